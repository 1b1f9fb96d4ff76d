"""The life of one request over its generations."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from disagg.errors import CapacityError, ContextLengthError, DisaggError, RemoteFault
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.registration import WorkerInfo
from disagg.messages.sampling import SamplingParams
from disagg.messages.session import Claim, EndReason
from disagg.messages.submit import PeerAddress, PullPlan, Role, Submit
from disagg.routing.actions import NewRequest, RouterAction, ToWorker
from disagg.routing.estimates.considered import Considered
from disagg.routing.exclusions import Exclusions
from disagg.routing.fleet import LostWorker
from disagg.routing.generation import Generation
from disagg.routing.policy.appraisal import considered
from disagg.routing.policy.protocol import Plan
from disagg.routing.record import RequestRecord
from disagg.routing.revisions import Revision
from disagg.routing.token_stream import TokenStream

KILLS_MAX = 2
"""Workers that were alive with a request and are lost under it, until it is refused as poison."""

_ERROR_BEFORE_TOKENS: dict[str, type[DisaggError]] = {
    EndReason.CAPACITY: CapacityError,
    EndReason.RESERVE_REFUSED: CapacityError,
    EndReason.REJECTED: ContextLengthError,
}
"""What a request that was given up before its first token ends with; others: `RemoteFault`."""

PREEMPTED = "preempted"
"""Cause of a plan: the worker before had no memory for the next token."""


class RoutedRequest:
    """One client request: its tokens, its generations, what went wrong so far.

    Attributes:
        stream: its tokens.
        revision: all of its plans are of workers of this one; None before the first.
        hashes: chain values of the full hash blocks of ``stream.tokens``, when last extended.
        exclusions: what the next plan should not repeat.
        num_excused: generations that ended because a worker was about to end, or lacked memory.
        outgrown_tokens: ``max_model_tokens`` of the largest worker that rejected it; 0 before.
        killers: workers lost while it had a part there, and heard since it was planned there.
        has_stalled: it was planned anew because a worker of its plan had stalled.
        was_preempted: it went on at another worker because one had no memory for it.
        claimed_at: workers that were sent a claim of its name, and may say that it is superseded.
        held_until_ms: until then it may wait at the router by choice, although there is room; 0: it
            has not done so.
        progress_ms: when something last went forward: a plan, a token, a report, or a prefill.
        current: the only generation whose messages count; set by `start`.
    """

    current: Generation

    def __init__(self, now_ms: int, request: NewRequest, router: str = "") -> None:
        sampling = request.sampling
        self.router = router
        self.request_id = request.request_id
        self.tenant = request.tenant
        self.claim = request.claim
        self.cache_salt = request.cache_salt
        self.slo = request.slo
        self.hand_over = request.hand_over
        self.sampling = sampling
        self.revision = request.revision
        self.hashes = request.hashes
        self.stream = TokenStream(
            request.request_id,
            request.token_ids,
            sampling.max_tokens,
            sampling.num_logprobs is not None,
            sampling.num_prompt_logprobs,
        )
        self.exclusions = Exclusions()
        self.num_excused = self.held_until_ms = 0
        self.outgrown_tokens = 0
        self.has_stalled = self.was_preempted = False
        self.killers: set[Incarnation] = set()
        self.claimed_at: set[Incarnation] = set()
        self.generations: list[Generation] = []
        self.progress_ms = now_ms
        self._num_computed_tokens = 0
        self.received_ms = now_ms if request.received_ms is None else request.received_ms
        self.submitted_ms = now_ms
        accepted_ms = request.accepted_ms
        self._accepted_ms = self.received_ms if accepted_ms is None else accepted_ms
        self.first_token_ms: int | None = None
        self.finished_ms: int | None = None
        self.num_tokens = 0
        self.outcome = ""
        self.error = ""
        self.refused: tuple[Considered, ...] = ()

    @property
    def expected_ms(self) -> float:
        """When its first token should be where it is decoded; 0: nobody knows."""
        current = self.generations[-1] if self.generations else None
        if current is None or current.estimate is None:
            return 0.0
        return current.started_ms + current.estimate.ttft_ms + current.estimate.handover_ms

    def assign(self, revision: Revision) -> None:
        """Begin at a revision, or anew at another one, before any token was accepted."""
        self.revision = revision
        self.hashes = tuple(revision.hashes(self.stream.tokens, self.cache_salt))
        self.stream.scores.forget()
        self.exclusions = Exclusions()
        self.outgrown_tokens = 0

    def extend_hashes(self) -> None:
        """Name the blocks that the accepted tokens have filled."""
        if self.revision is None:
            return
        hashes = list(self.hashes)
        self.revision.hash_extend(hashes, self.stream.tokens, self.cache_salt)
        self.hashes = tuple(hashes)

    def start(self, now_ms: int, generation: int, plan: Plan) -> list[RouterAction]:
        """Begin a generation after the accepted tokens; returns its submits."""
        self.stream.restart()
        self.progress_ms = now_ms
        self._num_computed_tokens = 0
        old = self.current.key if plan.takes_over else None
        current = Generation(
            key=RequestKey(self.request_id, generation, self.router),
            started_ms=now_ms,
            prefill=plan.prefill.info,
            decode=plan.decode.info,
            reason=plan.reason,
            expected_hit_tokens=plan.prefill.found_tokens,
            base=len(self.stream.tokens),
            taken_over=old,
            estimate=plan.estimate,
            considered=plan.considered or (considered(plan, chosen=True),),
        )
        self.generations.append(current)
        self.current = current
        submit = partial(
            Submit,
            key=current.key,
            token_ids=tuple(self.stream.tokens),  # of a first plan no copy
            hashes=self.hashes,
            cache_salt=self.cache_salt,
            sampling=self._sampling_left(current.base),
        )
        if old is not None:
            take = submit(role=Role.DECODE, peer=_address(current.prefill), take_over=old)
            return [ToWorker(current.decode.incarnation, take)]
        pull = None
        if plan.pull is not None:
            owner = _address(plan.pull.info)
            pull = PullPlan(owner, plan.pull.found_tokens)
        if plan.local:
            return [ToWorker(current.decode.incarnation, submit(role=Role.LOCAL, pull=pull))]
        # The decode worker first: it refuses a Reserve of a generation not submitted to it.
        return [
            ToWorker(info.incarnation, submit(role=role, peer=_address(peer), pull=first))
            for info, role, peer, first in (
                (current.decode, Role.DECODE, current.prefill, None),
                (current.prefill, Role.PREFILL, current.decode, pull),
            )
        ]

    def _sampling_left(self, num_tokens: int) -> SamplingParams:
        """Its sampling for what follows so many tokens; of a first plan no copy."""
        # Who wants no tokens, but something of the prompt, gets one sampled all the same: that is
        # how a prompt ends. It is not accepted.
        max_tokens = max(1, self.stream.end - num_tokens)
        num_wanted, sampling = self.stream.scores.num_wanted, self.sampling
        if (sampling.max_tokens, sampling.num_prompt_logprobs) == (max_tokens, num_wanted):
            return sampling
        return replace(sampling, max_tokens=max_tokens, num_prompt_logprobs=num_wanted)

    @property
    def num_tokens_left(self) -> int:
        """That it may still get."""
        return self.stream.end - len(self.stream.tokens)

    def num_failed_tries(self, cause: str) -> int:
        """Plans that have failed, the current one for this cause among them.

        A worker that drains has not failed, and does so once in its life; nor has one that lacks
        memory, for which a request goes elsewhere once.
        """
        self.num_excused += cause in (EndReason.DRAINING, PREEMPTED)
        return len(self.generations) - self.num_excused

    def was_claimed(self, worker: Incarnation, generation: int) -> bool:
        """Whether the worker was sent a claim of its name, in this generation or an earlier one.

        Generations of an earlier request with its id are lower than its first one.
        """
        return worker in self.claimed_at and generation >= self.generations[0].key.generation

    def claims(self, keeper_of: Callable[[bytes], Incarnation | None]) -> list[RouterAction]:
        """Claim its name, if it has one, where it is served and at its keeper."""
        if not self.claim:
            return []
        keeper = keeper_of(self.claim)
        workers = dict.fromkeys((*self.current.workers, *([keeper] if keeper else ())))
        self.claimed_at.update(workers)
        again = len(self.generations) > 1
        waited_ms = max(0, self.current.started_ms - self._accepted_ms)
        claim = Claim(self.current.key, self.claim, self._accepted_ms, again, waited_ms)
        return [ToWorker(worker, claim) for worker in workers]

    def computed(self, now_ms: int, num_computed_tokens: int) -> None:
        """Positions that a prefill has computed: progress only above the highest so far.

        Since the last token, plan or report, that is: who is preempted while it decodes computes
        again, and so does who gives a prefix pull up. Work that is done over and over, each time
        lost, does not renew for ever.
        """
        if self._num_computed_tokens < num_computed_tokens <= len(self.stream.tokens):
            self._num_computed_tokens = num_computed_tokens
            self.progress_ms = now_ms

    def reported(self, now_ms: int) -> None:
        """A worker's first report of a prefill or of a transfer in the current generation."""
        self.progress_ms = now_ms
        self._num_computed_tokens = 0

    def lost(self, worker: LostWorker) -> RemoteFault | None:
        """Count the loss of a worker that had a part here; an error if it is one too many.

        Who was not heard since the plan may have been dead before it, as when many workers die at
        one moment: that speaks against no request.
        """
        self.exclusions.local_on = None
        if worker.heard_ms < self.current.started_ms:
            return None
        self.killers.add(worker.incarnation)
        if len(self.killers) < KILLS_MAX:
            return None
        names = ", ".join(sorted(worker.worker_id for worker in self.killers))
        return RemoteFault(
            f"{len(self.killers)} workers were lost while they served this request ({names}); it "
            "is not tried on another one"
        )

    def error_of(self, cause: str, message: str) -> DisaggError:
        """What it ends with where no plan is left after ``cause``."""
        before = RemoteFault if self.num_tokens else _ERROR_BEFORE_TOKENS.get(cause, RemoteFault)
        return before(message)

    def delivered(self, now_ms: int, num_tokens: int) -> None:
        """Count tokens handed to the client."""
        self.progress_ms = now_ms
        self._num_computed_tokens = 0
        self.num_tokens += num_tokens
        self.current.num_tokens += num_tokens
        if self.first_token_ms is None and num_tokens:
            self.first_token_ms = now_ms

    def end(self, now_ms: int, outcome: str, error: str = "") -> None:
        """Nothing is delivered after this; only the record stays."""
        self.finished_ms = now_ms
        self.outcome = outcome
        self.error = error
        self.hashes = ()
        self.stream.restart()
        self.stream.scores.take()
        self.stream.tokens = ()

    def record(self) -> RequestRecord:
        """A copy of what is known of the request and its generations, in plain types."""
        return RequestRecord(
            request_id=self.request_id,
            revision=self.revision.name if self.revision is not None else "",
            num_prompt_tokens=self.stream.num_prompt_tokens,
            seed=self.sampling.seed,
            received_ms=self.received_ms,
            submitted_ms=self.submitted_ms,
            first_token_ms=self.first_token_ms,
            finished_ms=self.finished_ms,
            num_tokens=self.num_tokens,
            generations=tuple(generation.record() for generation in self.generations),
            outcome=self.outcome,
            error=self.error,
            refused=self.refused,
        )


def _address(info: WorkerInfo) -> PeerAddress:
    return PeerAddress(info.incarnation, info.address)
