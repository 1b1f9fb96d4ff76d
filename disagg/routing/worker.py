"""One worker of the fleet: what it has said, and what was given to it since."""

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from disagg.messages.identity import Incarnation
from disagg.messages.registration import WorkerInfo
from disagg.messages.stats import WorkerStats
from disagg.routing.pulse import Pulse

if TYPE_CHECKING:  # or each command would import numpy
    from disagg.routing.index import PrefixIndex


def turn_of(router_id: str, worker_id: str) -> bytes:
    """A worker's turn among those that are alike, another one at each router.

    Routers see a worker become idle at the same moment. With one order, as that of ids, all of them
    would give it their next prompt, and none to the idle ones behind it, until its stats say so.

    Args:
        router_id: of a router's life; "": there is one, and ids alone are the order.
        worker_id: of a worker.
    """
    return (
        blake2b(f"{router_id} {worker_id}".encode(), digest_size=8).digest() if router_id else b""
    )


@dataclass(slots=True)
class Worker:
    """State of a registered worker; only `Fleet` changes it."""

    info: WorkerInfo
    index: "PrefixIndex"
    """Where its blocks are."""
    heard_ms: int
    """Time of its last registration or message."""
    connected: bool = False
    stats: WorkerStats | None = None
    stalled_since_ms: int | None = None
    """Its stats have said so since then without a break; None: they do not."""
    planned_requests: int = 0
    """Requests submitted to it since its last stats."""
    planned_tokens: int = 0
    """Tokens that it has to prefill for those."""
    planned_prompts: int = 0
    """Those of them with such tokens."""
    planned_decodes: int = 0
    """Those of them that it will decode."""
    own_tokens: int = 0
    """That this router's requests have to prefill there, as far as it knows."""
    own_tokens_told: int = 0
    """The same by its last stats."""
    told_ms: int | None = None
    """When it was last told that another process claims its id."""
    pulse: Pulse = field(default_factory=Pulse)
    """How often it is heard."""
    turn: bytes = b""
    """Of workers that are alike the first by it is taken, see `turn_of`."""

    @property
    def order(self) -> tuple[bytes, Incarnation]:
        """Sorts workers that are alike."""
        return self.turn, self.info.incarnation

    @property
    def ready(self) -> bool:
        """It is connected, and its last stats have ``ready`` set."""
        # No stats yet is not ready: a worker that looks healthy but never reported can hang.
        return self.connected and self.stats is not None and self.stats.ready

    @property
    def stalled(self) -> bool:
        """Its step took far too long by its last stats."""
        return self.stats is not None and self.stats.stalled

    @property
    def prefill_queue(self) -> tuple[int, int]:
        """Tokens to prefill, then requests, before a new one.

        Stats may be a second old: what is this router's own is known better, as its prompts end.
        """
        stats = self.stats
        if stats is None:
            return self.planned_tokens, self.planned_requests
        told = stats.num_prefill_tokens_queued
        others = max(0, told - self.own_tokens_told)
        tokens = min(told + self.planned_tokens, others + self.own_tokens)
        return tokens, stats.num_waiting + self.planned_requests

    @property
    def num_prompts_queued(self) -> int:
        """Prompts that the tokens to prefill are of; at least one where there are any."""
        stats = self.stats
        known = stats.num_prompts_queued if stats else 0
        if known is None:  # an earlier release
            return max(1, self.prefill_queue[1])
        return max(bool(self.prefill_queue[0]), known + self.planned_prompts)

    @property
    def num_decoding(self) -> int:
        """Sequences that are given token after token."""
        stats = self.stats
        if stats is None:
            return 0
        return stats.num_running if stats.num_decoding is None else stats.num_decoding

    @property
    def num_coming(self) -> int:
        """Sequences that will be, but wait for their prompts still."""
        stats = self.stats
        there = sum(load.num_requests for load in stats.loads) if stats else 0
        return max(0, there - self.num_decoding) + self.planned_decodes

    @property
    def decode_load(self) -> int:
        """Requests there, running, waiting, being pulled or on their way."""
        stats = self.stats
        there = stats.num_waiting + stats.num_reservations + stats.num_running if stats else 0
        return there + self.planned_requests

    @property
    def is_loaded(self) -> bool:
        """It has work, or KV that others pull: it reports several times a second."""
        stats = self.stats
        return self.decode_load > 0 or (stats is not None and stats.num_leases > 0)

    @property
    def num_blocks_free(self) -> int:
        """Free blocks of its pool, cached ones included, by its last stats."""
        return self.stats.num_blocks_free if self.stats else 0
