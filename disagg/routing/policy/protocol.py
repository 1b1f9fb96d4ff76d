"""What a policy is given, what it answers, and what every policy must keep."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from disagg.messages.identity import Incarnation
from disagg.routing.exclusions import Exclusions
from disagg.routing.fleet import WorkerView
from disagg.routing.index import PrefixHit


@dataclass(frozen=True, slots=True)
class Candidate:
    """A ready worker, what it holds of the prompt, and what its pool and model have room for."""

    view: WorkerView
    hit: PrefixHit
    """Of the prompt, by the router's index; may be stale."""
    can_prefill: bool
    """There is room for the prompt and one token more; where not, only to pull a prefix from."""
    can_decode: bool
    """There is room up to the request's last token: to decode it, or to serve it alone."""

    @property
    def incarnation(self) -> Incarnation:
        """The worker's id and its epoch."""
        return self.view.info.incarnation

    @property
    def name(self) -> str:
        """The worker's id, for reasons and messages."""
        return self.incarnation.worker_id

    @property
    def prefill_queue(self) -> tuple[int, int]:
        """Tokens to prefill, then requests, before a new one."""
        stats = self.view.stats
        tokens = stats.num_prefill_tokens_queued if stats else 0
        waiting = stats.num_waiting if stats else 0
        return tokens + self.view.planned_tokens, waiting + self.view.planned_requests

    @property
    def decode_load(self) -> int:
        """Requests there, running, waiting, being pulled or on their way."""
        stats = self.view.stats
        there = stats.num_waiting + stats.num_reservations + stats.num_running if stats else 0
        return there + self.view.planned_requests

    @property
    def num_blocks_free(self) -> int:
        """Free blocks of its pool, cached ones included, by its last stats."""
        return self.view.stats.num_blocks_free if self.view.stats else 0

    @property
    def prefill_order(self) -> tuple[int, tuple[int, int], Incarnation]:
        """Sorts prefill workers: the longest usable prefix, then the shortest queue."""
        return -self.hit.usable_tokens, self.prefill_queue, self.incarnation

    @property
    def decode_order(self) -> tuple[int, int, int, Incarnation]:
        """Sorts decode workers: the least load, the most free blocks, the longest prefix."""
        return (
            self.decode_load,
            -self.num_blocks_free,
            -sum(self.hit.group_tokens),
            self.incarnation,
        )


@dataclass(frozen=True, slots=True)
class Demand:
    """What one request needs, and what its plan should not repeat."""

    num_tokens: int
    """Tokens that must be in a cache before it decodes: the prompt and what was accepted so far."""
    num_tokens_max: int
    """Tokens at its end, ``max_tokens`` reached."""
    exclusions: Exclusions
    bad_pairs: frozenset[frozenset[Incarnation]] = frozenset()
    """Pairs of workers that rest, for all requests, after a failed transfer."""

    def may_pair(self, one: Candidate, other: Candidate) -> bool:
        """Whether KV may move between them: equal contracts, and no failure to rest from."""
        pair = frozenset((one.incarnation, other.incarnation))
        if len(pair) == 1:
            return True
        if pair in self.exclusions.pairs or pair in self.bad_pairs:
            return False
        return not one.view.info.contract.mismatches(other.view.info.contract)


@dataclass(frozen=True, slots=True)
class Plan:
    """Workers of one generation with their parts, and the reason."""

    prefill: Candidate
    decode: Candidate
    reason: str
    """Shown in the request's record."""
    pull: Candidate | None = None
    """Whose cached prefix the prefill worker pulls first."""
    takes_over: bool = False
    """The decode worker takes over the lease that the prefill worker holds already."""

    @property
    def local(self) -> bool:
        """One worker does both; nothing is handed over."""
        return self.prefill.incarnation == self.decode.incarnation


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Settings of the router that policies go by; each takes what it needs."""

    pull_tokens_min: int
    """Tokens of prefix that another worker must have more, to be pulled from."""


class Policy(Protocol):
    """The rule by which workers are chosen.

    Equal arguments give equal plans: no I/O, no clock, no randomness. A policy is made once, by
    calling its class with `PolicyOptions`.
    """

    def plan(self, demand: Demand, candidates: Sequence[Candidate]) -> Plan:
        """Choose among the candidates, of which at least one can decode.

        The plan's workers must be able to do their part. Everything else is a preference: who is
        excluded can still be chosen when nobody else is left.

        Raises:
            DisaggError: the request is refused, or ends if it was planned before.
        """
        ...
