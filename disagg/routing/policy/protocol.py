"""What a policy is told of one worker and of a request, and what it answers."""

from typing import TYPE_CHECKING

from disagg.messages.frozen import dataclass
from disagg.messages.identity import Incarnation
from disagg.messages.lazy import cached_property
from disagg.messages.registration import WorkerInfo
from disagg.routing.bad_pairs import NONE_RESTS, RestingPairs
from disagg.routing.estimates.considered import Considered
from disagg.routing.estimates.estimate import ANSWER_TOKENS, Estimate
from disagg.routing.exclusions import Exclusions
from disagg.routing.slo import NO_SLO, Slo
from disagg.routing.worker import Worker

if TYPE_CHECKING:  # or each command would import numpy
    from disagg.routing.prefix_hits import PrefixHits


@dataclass(frozen=True, slots=False)
class Candidate:
    """A ready worker, what it holds of the prompt, and what its pool and model have room for.

    What it holds is by the router's index, which may be stale, and is found out when it is asked.
    """

    worker: Worker
    """To be looked at only."""
    held: "PrefixHits"
    """By the workers of its layout."""
    can_prefill: bool
    """There is room for the prompt and one token more; where not, only to pull a prefix from."""
    can_decode: bool
    """There is room up to the request's last token: to decode it, or to serve it alone."""

    @property
    def info(self) -> WorkerInfo:
        """The worker's registration."""
        return self.worker.info

    @property
    def incarnation(self) -> Incarnation:
        """The worker's id and its epoch."""
        return self.worker.info.incarnation

    @property
    def name(self) -> str:
        """The worker's id, for reasons and messages."""
        return self.worker.info.incarnation.worker_id

    @property
    def prefill_queue(self) -> tuple[int, int]:
        """Tokens to prefill, then requests, before a new one."""
        return self.worker.prefill_queue

    @property
    def decode_load(self) -> int:
        """Requests there, running, waiting, being pulled or on their way."""
        return self.worker.decode_load

    @property
    def num_blocks_free(self) -> int:
        """Free blocks of its pool, cached ones included, by its last stats."""
        return self.worker.num_blocks_free

    @cached_property
    def usable_tokens(self) -> int:
        """Tokens of the prompt in its pool, on which all groups agree."""
        return self.held.usable_by(self.incarnation)

    @cached_property
    def always_visible_tokens(self) -> int:
        """Tokens in its pool in all groups that see everything: a hand-over to it moves the rest.

        Of other groups it always moves what a query after the prompt sees.
        """
        return self.held.always_visible_by(self.incarnation)

    @property
    def reach_tokens(self) -> int:
        """The same once it has loaded what its tiers have; 0: they have no more of it."""
        return self._reached[0]

    @property
    def loads(self) -> tuple[tuple[int, int], ...]:
        """For that: tier and blocks, of each tier that it has to read."""
        return self._reached[1]

    @cached_property
    def _reached(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        return self.held.reached_by(self.incarnation)

    @cached_property
    def found_tokens(self) -> int:
        """Tokens of the prompt that it need not compute: in its pool, or loaded from its tiers."""
        return max(self.usable_tokens, self.reach_tokens)

    def tier_name(self, tier: int) -> str:
        """The name of one of its tiers."""
        return self.info.tiers[tier].name

    @property
    def load_ms(self) -> float:
        """What loading the rest of the prefix from its tiers takes, by its own measurement.

        0 where it has not loaded anything yet.
        """
        stats = self.worker.stats
        if not self.loads or stats is None:
            return 0.0
        counts = dict(stats.counters)
        load_us = 0.0
        for tier, num_blocks in self.loads:
            name = self.tier_name(tier)
            num_read = counts.get(f"tier_read_{name}", 0) + counts.get(f"tier_missed_{name}", 0)
            load_us += num_blocks * counts.get(f"tier_read_us_{name}", 0) / max(1, num_read)
        return load_us / 1000

    @property
    def load_tokens(self) -> int:
        """The same in tokens of prefill; 0 where it has not computed anything yet either."""
        stats = self.worker.stats
        if not self.loads or stats is None:
            return 0
        counts = dict(stats.counters)
        prefill_us, tokens = counts.get("prefill_step_us", 0), counts.get("prefill_step_tokens", 0)
        return int(1000 * self.load_ms * tokens / prefill_us) if prefill_us else 0

    @property
    def saved_tokens(self) -> int:
        """Tokens of prefill that its prefix is worth, with what loading a part of it costs."""
        return max(self.usable_tokens, self.reach_tokens - self.load_tokens)

    @property
    def prefill_order(self) -> tuple[int, tuple[int, int], tuple[bytes, Incarnation]]:
        """Sorts prefill workers: the prefix that saves most, then the shortest queue."""
        return -self.saved_tokens, self.prefill_queue, self.worker.order

    @property
    def decode_order(self) -> tuple[int, int, int, tuple[bytes, Incarnation]]:
        """Sorts decode workers: the least load, the most free blocks, the least to move."""
        return (
            self.decode_load,
            -self.num_blocks_free,
            -self.always_visible_tokens,
            self.worker.order,
        )


@dataclass(frozen=True, slots=True)
class Demand:
    """What one request needs, and what its plan should not repeat."""

    num_tokens: int
    """Tokens that must be in a cache before it decodes: the prompt and what was accepted so far."""
    num_tokens_max: int
    """Tokens at its end, ``max_tokens`` reached."""
    exclusions: Exclusions
    bad_pairs: RestingPairs = NONE_RESTS
    """Pairs of workers that rest, for all requests, after a failed transfer."""
    slo: Slo = NO_SLO
    waited_ms: int = 0
    """Since the request's arrival."""
    is_first: bool = True
    """Nothing of it was ever submitted."""
    num_behind: int = 0
    """Other requests that wait at the router, for room or by choice."""

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that it may still get, as far as plans look ahead."""
        return max(0, min(ANSWER_TOKENS, self.num_tokens_max - self.num_tokens))

    def is_shed(self, ttft_ms: float) -> bool:
        """Whether it had better not go at all, if its first token is so far from now."""
        return self.is_first and self.slo.is_missed(self.waited_ms + ttft_ms)


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
    estimate: Estimate | None = None
    """What it is expected to take; None: too little was measured, or nobody has asked."""
    num_slos_missed: float = 0.0
    """By that estimate: requests that would miss one, it or those whom it disturbs; likely ones
    count in part."""
    missed_ms: float = 0.0
    """Milliseconds that those count for."""
    hold_ms: float = 0.0
    """So long at most it had better wait at the router, although there is room; 0: it goes now."""
    considered: tuple[Considered, ...] = ()
    """What was weighed against it, and itself; few. Empty: nothing else was."""

    def estimated(self, found: Estimate, num_slos_missed: float, missed_ms: float) -> "Plan":
        """The same, with what it is expected to take; `replace` takes ten times as long."""
        return Plan(
            self.prefill,
            self.decode,
            self.reason,
            self.pull,
            self.takes_over,
            found,
            num_slos_missed,
            missed_ms,
            self.hold_ms,
            self.considered,
        )

    @property
    def found_tokens(self) -> int:
        """Tokens of the prompt that are not computed: found where it is prefilled, or pulled."""
        pulled = self.pull.found_tokens if self.pull is not None else 0
        return max(pulled, self.prefill.found_tokens)

    @property
    def local(self) -> bool:
        """One worker does both; nothing is handed over."""
        return self.prefill.worker is self.decode.worker


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Settings of the router that policies go by; each takes what it needs (docs/policies.md)."""

    pull_tokens_min: int = 256
    """Tokens of prefix that another worker must have more, to be pulled from. A pull costs a
    request, a READ and a commit before the first chunk: tens of milliseconds under load. So much
    prefix costs more to compute on any worker worth pulling to."""
    decode_prefill_tokens_max: int = 512
    """Tokens that a decode worker may compute of a prompt whose prefix its tiers have: as many as a
    chunk of a prompt beside which decodes go on."""
    uncached_tokens_max: int = 512
    """Tokens that a decode worker may compute of a prompt, by a threshold."""
    uncached_share_max: float = 1.0
    """The same as a share of the prompt."""
    prefill_busy_tokens: int = 4096
    """Tokens that wait at the prefill worker with the fewest, above which all of them are busy."""
    decode_busy_share: float = 0.9
    """Share of a decode worker's blocks in use, above which it is busy."""
    affinity_weight: float = 1.0
    """What an uncached token counts for, beside one that waits."""
    others_weight: float = 1.0
    """What a millisecond counts for by which others are held up, beside one of the request's."""
    slo_tpot_ms: float = 0.0
    """What everybody's time per token should stay below; 0: any."""
