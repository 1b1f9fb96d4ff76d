"""The first policy: the longest usable prefix prefills, the shortest queue decodes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from disagg.errors import ContextLengthError, RemoteFault
from disagg.messages.identity import Incarnation
from disagg.routing.exclusions import Exclusions
from disagg.routing.fleet import WorkerView
from disagg.routing.index import PrefixHit


@dataclass(frozen=True, slots=True)
class Candidate:
    """A ready worker and what it holds of the prompt."""

    view: WorkerView
    hit: PrefixHit

    @property
    def incarnation(self) -> Incarnation:
        """Who it is."""
        return self.view.info.incarnation

    @property
    def name(self) -> str:
        """Its worker id."""
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
        """Requests there, running, waiting or on their way."""
        stats = self.view.stats
        there = stats.num_waiting + stats.num_running if stats else 0
        return there + self.view.planned_requests

    @property
    def num_blocks_free(self) -> int:
        """As last reported."""
        return self.view.stats.num_blocks_free if self.view.stats else 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Who does what, and why."""

    prefill: Candidate
    decode: Candidate
    reason: str
    pull: Candidate | None = None
    """Whose cached prefix the prefill worker pulls first."""
    takes_over: bool = False
    """The decode worker takes over the lease that the prefill worker holds already."""

    @property
    def local(self) -> bool:
        """One worker does both; nothing is handed over."""
        return self.prefill.incarnation == self.decode.incarnation


def choose(
    candidates: Sequence[Candidate],
    num_tokens: int,
    num_tokens_max: int,
    exclusions: Exclusions,
    bad_pairs: frozenset[frozenset[Incarnation]] = frozenset(),
    *,
    pull_tokens_min: int,
) -> Plan:
    """Plan a prompt of ``num_tokens`` that grows to at most ``num_tokens_max``.

    The worker that prefills pulls from another one that has at least ``pull_tokens_min`` more
    tokens of the prefix, whatever its role; of these from the one that has the most.

    Raises:
        RemoteFault: there is no candidate.
        ContextLengthError: none takes that many tokens.
    """
    plan = _choose(candidates, num_tokens, num_tokens_max, exclusions, bad_pairs)
    banned = exclusions.pairs | bad_pairs
    owners = [
        c
        for c in candidates
        if c.hit.usable_tokens - plan.prefill.hit.usable_tokens >= max(1, pull_tokens_min)
        and c.incarnation not in exclusions.workers
        and _may_pair(plan.prefill, c, banned)
    ]
    if not owners:
        return plan
    owner = min(owners, key=_pull_order)
    more = owner.hit.usable_tokens - plan.prefill.hit.usable_tokens
    why = f"{plan.reason}; pulls {more} more tokens of the prefix from {owner.name}"
    return replace(plan, pull=owner, reason=why)


def choose_take_over(
    candidates: Sequence[Candidate],
    owner: Incarnation,
    lost: Incarnation,
    num_tokens: int,
    num_tokens_max: int,
    exclusions: Exclusions,
    bad_pairs: frozenset[frozenset[Incarnation]],
) -> Plan | None:
    """Another decode worker for a prompt whose prefill is over and sealed at ``owner``.

    None where there is nobody: then the rest is planned as ever.
    """
    banned = exclusions.pairs | bad_pairs
    holders = [c for c in candidates if c.incarnation == owner]
    readers = [
        c
        for c in candidates
        if c.view.info.role in ("decode", "both")
        and c.incarnation not in exclusions.workers | exclusions.decode | {owner, lost}
        and num_tokens <= c.view.info.handover_tokens_max
        and num_tokens_max <= c.view.info.max_model_tokens
        and holders
        and _may_pair(holders[0], c, banned)
    ]
    if not readers:
        return None
    reader = min(readers, key=_decode_order)
    why = (
        f"decode on {reader.name} takes over the lease that {owner.worker_id} holds for "
        f"{lost.worker_id}, which was lost"
    )
    return Plan(holders[0], reader, why, takes_over=True)


def _choose(
    candidates: Sequence[Candidate],
    num_tokens: int,
    num_tokens_max: int,
    exclusions: Exclusions,
    bad_pairs: frozenset[frozenset[Incarnation]],
) -> Plan:
    """Who prefills and who decodes."""
    if not candidates:
        raise RemoteFault("no worker is ready")
    fitting = [c for c in candidates if num_tokens_max <= c.view.info.max_model_tokens]
    if not fitting:
        limit = max(c.view.info.max_model_tokens for c in candidates)
        raise ContextLengthError(
            f"prompt and max_tokens need {num_tokens_max} tokens, the workers take {limit}",
            param="max_tokens",
        )
    if exclusions.local_on is not None:
        for candidate in fitting:
            if candidate.incarnation == exclusions.local_on and candidate.incarnation not in (
                exclusions.workers | exclusions.decode
            ):
                return _local(candidate, "no hand-over after one failed")
    fresh = [c for c in fitting if c.incarnation not in exclusions.workers] or fitting
    if len(fresh) == 1:
        return _local(fresh[0], "the only worker that is ready and not at fault")
    prefills = [c for c in fresh if c.view.info.role in ("prefill", "both")]
    decodes = [c for c in fresh if c.view.info.role in ("decode", "both")]
    if not prefills or not decodes:
        missing = "decode" if prefills else "prefill"
        return _best_local(fresh, exclusions, f"no {missing} worker is ready")
    prefills = [c for c in prefills if num_tokens <= c.view.info.handover_tokens_max]
    decodes = [c for c in decodes if num_tokens <= c.view.info.handover_tokens_max]
    if not prefills or not decodes:
        return _best_local(fresh, exclusions, f"{num_tokens} tokens are too many to hand over")
    roomy = [c for c in decodes if c.incarnation not in exclusions.decode]
    if not roomy:
        return _best_local(fresh, exclusions, "no other decode worker has room")
    banned = exclusions.pairs | bad_pairs
    for prefill in sorted(prefills, key=_prefill_order):
        partners = [d for d in roomy if _may_pair(prefill, d, banned)]
        if partners:
            decode = min(partners, key=_decode_order)
            return _paired(prefill, decode)
    return _best_local(fresh, exclusions, "no two workers can hand over to each other now")


def _may_pair(prefill: Candidate, decode: Candidate, banned: set[frozenset[Incarnation]]) -> bool:
    if prefill.incarnation == decode.incarnation:
        return True
    if frozenset((prefill.incarnation, decode.incarnation)) in banned:
        return False
    return not prefill.view.info.contract.mismatches(decode.view.info.contract)


def _prefill_order(c: Candidate) -> tuple[int, tuple[int, int], Incarnation]:
    return -c.hit.usable_tokens, c.prefill_queue, c.incarnation


def _decode_order(c: Candidate) -> tuple[int, int, int, Incarnation]:
    return c.decode_load, -c.num_blocks_free, -sum(c.hit.group_tokens), c.incarnation


def _pull_order(c: Candidate) -> tuple[int, int, Incarnation]:
    return -c.hit.usable_tokens, c.decode_load, c.incarnation


def _best_local(candidates: Sequence[Candidate], exclusions: Exclusions, why: str) -> Plan:
    roomy = [c for c in candidates if c.incarnation not in exclusions.decode] or candidates
    return _local(min(roomy, key=_prefill_order), why)


def _local(candidate: Candidate, why: str) -> Plan:
    name = candidate.incarnation.worker_id
    hit = candidate.hit.usable_tokens
    return Plan(candidate, candidate, f"local on {name} (prefix {hit} tokens): {why}")


def _paired(prefill: Candidate, decode: Candidate) -> Plan:
    if prefill.incarnation == decode.incarnation:
        return _local(prefill, "best for prefill and for decode")
    queued, waiting = prefill.prefill_queue
    return Plan(
        prefill,
        decode,
        f"prefill on {prefill.incarnation.worker_id} (prefix {prefill.hit.usable_tokens} tokens, "
        f"{queued} tokens and {waiting} requests before it), decode on "
        f"{decode.incarnation.worker_id} ({decode.decode_load} requests there, "
        f"{decode.num_blocks_free} blocks free)",
    )
