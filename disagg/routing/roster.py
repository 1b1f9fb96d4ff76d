"""The workers of the fleet as bits, sorted by what plans go by."""

from bisect import insort
from collections.abc import Iterator
from functools import lru_cache
from typing import TypeVar

from disagg.messages.identity import Incarnation
from disagg.messages.registration import Contract
from disagg.routing.ranking import Ranking
from disagg.routing.worker import Worker
from disagg.routing.worker_bits import WorkerBits, bits_of, is_single

_Key = TypeVar("_Key")
_FEW = 16
"""So few bits are compared one by one; more are found along the order of all."""


@lru_cache(maxsize=256)
def can_exchange(one: Contract, other: Contract) -> bool:
    """Whether workers with these contracts read each other's blocks, whole or in parts."""
    return not one.mismatches(other)


class Roster:
    """Kept up to date with every change of a worker, so that a plan need not look at each.

    Attributes:
        bits: of the workers; indexes give and take them.
        ready: workers that take requests.
        stalled: workers whose step may never end.
        idle: workers that have no prompt to compute.
        prefill_queues: by `Worker.prefill_queue`.
        decode_loads: by `Worker.decode_load`, then the most free blocks.
        model_tokens: by ``max_model_tokens``.
        handover_tokens: by ``handover_tokens_max``.
    """

    def __init__(self) -> None:
        self.bits = WorkerBits()
        self.ready = 0
        self.stalled = 0
        self.idle = 0
        self.prefill_queues = Ranking[tuple[int, int]]()
        self.decode_loads = Ranking[tuple[int, int]]()
        self.model_tokens = Ranking[int]()
        self.handover_tokens = Ranking[int]()
        self._workers: dict[int, Worker] = {}
        self._in_order: list[tuple[tuple[bytes, Incarnation], int]] = []
        self._roles: dict[str, int] = {}
        self._revisions: dict[str, int] = {}
        self._contracts: dict[Contract, int] = {}

    def add(self, worker: Worker) -> None:
        """Take a worker in that has its bit already."""
        name = worker.info.incarnation
        bit = self.bits.of_one(name)
        self._workers[bit] = worker
        insort(self._in_order, (worker.order, bit))
        _join(self._contracts, worker.info.contract, bit)
        _join(self._revisions, worker.info.revision, bit)
        self.changed(worker)

    def changed(self, worker: Worker) -> None:
        """Its role, its limits or whether it is ready may have changed; so may its load."""
        bit, info = self.bits.of_one(worker.info.incarnation), worker.info
        _leave(self._roles, bit)
        _join(self._roles, info.role, bit)
        self.model_tokens.put(bit, info.max_model_tokens)
        self.handover_tokens.put(bit, info.handover_tokens_max)
        self.loaded(worker)

    def loaded(self, worker: Worker) -> None:
        """It has another load, or is ready or no more."""
        bit = self.bits.of_one(worker.info.incarnation)
        self.ready = self.ready | bit if worker.ready else self.ready & ~bit
        self.stalled = self.stalled | bit if worker.stalled else self.stalled & ~bit
        num_tokens, _ = queue = worker.prefill_queue
        self.idle = self.idle & ~bit if num_tokens else self.idle | bit
        self.prefill_queues.put(bit, queue)
        self.decode_loads.put(bit, (worker.decode_load, -worker.num_blocks_free))

    def remove(self, worker: Worker) -> None:
        """Forget a worker that still has its bit."""
        name = worker.info.incarnation
        bit = self.bits.of_one(name)
        del self._workers[bit]
        self._in_order.remove((worker.order, bit))
        _leave(self._roles, bit)
        _leave(self._revisions, bit)
        _leave(self._contracts, bit)
        for ranking in (self.prefill_queues, self.decode_loads):
            ranking.remove(bit)
        for sizes in (self.model_tokens, self.handover_tokens):
            sizes.remove(bit)
        self.ready &= ~bit
        self.stalled &= ~bit
        self.idle &= ~bit

    def worker(self, bit: int) -> Worker:
        """The worker of a bit."""
        return self._workers[bit]

    def in_revision(self, name: str) -> int:
        """Workers of a revision."""
        return self._revisions.get(name, 0)

    def with_role(self, role: str) -> int:
        """Workers that prefill, or that decode: whose only role it is, or who do both."""
        return self._roles.get(role, 0) | self._roles.get("both", 0)

    def of_role(self, role: str) -> int:
        """Workers that are registered with this role."""
        return self._roles.get(role, 0)

    def exchanging(self, contract: Contract) -> int:
        """Workers that can read what one of this contract has."""
        found = 0
        for theirs, bits in self._contracts.items():
            if theirs is contract or can_exchange(contract, theirs):
                found |= bits
        return found

    def with_partners(self, bits: int, others: int) -> int:
        """Of some workers those that can read what one of the others has, by their contracts."""
        if len(self._contracts) <= 1:
            return bits
        found = 0
        for contract, theirs in self._contracts.items():
            if theirs & bits and self.exchanging(contract) & others:
                found |= theirs & bits
        return found

    def in_order(self, bits: int) -> Iterator[int]:
        """The bits of these workers one by one, by `Worker.order`."""
        return (bit for _, bit in self._in_order if bit & bits)

    def first(self, bits: int) -> int:
        """Of some workers the first by `Worker.order`."""
        if is_single(bits):
            return bits
        if bits.bit_count() <= _FEW:
            return min(bits_of(bits), key=lambda bit: self._workers[bit].order)
        return next(self.in_order(bits))


def _join(masks: dict[_Key, int], key: _Key, bit: int) -> None:
    masks[key] = masks.get(key, 0) | bit


def _leave(masks: dict[_Key, int], bit: int) -> None:
    for key, bits in masks.items():
        if bits & bit:
            if bits == bit:
                del masks[key]
            else:
                masks[key] = bits ^ bit
            return
