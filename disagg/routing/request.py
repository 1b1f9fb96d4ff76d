"""The life of one request over its generations."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.outputs import SequenceOutput
from disagg.messages.registration import WorkerInfo
from disagg.messages.session import (
    Cancel,
    PeerAddress,
    PrefillReport,
    PullPlan,
    Role,
    Submit,
    TransferReport,
)
from disagg.routing.actions import NewRequest, RouterAction, ToWorker
from disagg.routing.exclusions import Exclusions
from disagg.routing.policy import Plan
from disagg.routing.record import GenerationRecord, RequestRecord
from disagg.routing.token_stream import TokenStream


@dataclass(slots=True)
class Generation:
    """One try: a plan that was submitted and what came of it."""

    key: RequestKey
    started_ms: int
    prefill: WorkerInfo
    decode: WorkerInfo
    reason: str
    expected_hit_tokens: int
    base: int
    """Position of its first new token."""
    taken_over: RequestKey | None = None
    """The generation whose lease the decode worker takes over; nothing is prefilled then."""
    transferred: bool = False
    """The decode worker has its KV: what the prefill worker does is over."""
    prefill_gone: bool = False
    """Its stream ended after that: a token it still owed comes from the decode worker or never."""
    finished_at: set[Incarnation] = field(default_factory=set)
    """Workers that reported the last token."""
    prefill_report: PrefillReport | None = None
    prefill_ms: int | None = None
    transfer: TransferReport | None = None
    pull: TransferReport | None = None
    num_tokens: int = 0
    cause: str = ""
    local: bool = field(init=False)
    """One worker does both."""
    workers: tuple[Incarnation, ...] = field(init=False)
    """Who has a part, the decode worker first."""

    def __post_init__(self) -> None:
        decode, prefill = self.decode.incarnation, self.prefill.incarnation
        self.local = prefill == decode
        self.workers = (decode,) if self.local else (decode, prefill)

    def saw_output(self, worker: Incarnation, output: SequenceOutput) -> None:
        """Learn from tokens who is done."""
        if output.finish_reason:
            self.finished_at.add(worker)
        if (
            not self.transferred
            and worker == self.decode.incarnation
            and output.position + len(output.token_ids) > self.base + 1
        ):
            self.transferred = True

    @property
    def lease_tokens(self) -> int | None:
        """Prompt tokens under a sealed lease; None while the prefill goes on, or is handed over."""
        if self.local or self.transferred or self.prefill_gone:
            return None
        if self.taken_over is not None:
            return self.base - 1
        return self.base if self.prefill_report is not None else None

    def over_at(self, worker: Incarnation) -> bool:
        """Nothing can be held there for this generation any more."""
        return worker in self.finished_at or (
            self.transferred and not self.local and worker == self.prefill.incarnation
        )

    def cancels(
        self, reason: str, *, also_over: bool, keeps_lease: bool = False
    ) -> Iterator[ToWorker]:
        """``Cancel`` for every part, or for those that may still hold something.

        With ``keeps_lease`` the prefill worker is told nothing: another one takes it over.
        """
        prefill = self.prefill.incarnation
        for worker in self.workers:
            if keeps_lease and worker == prefill:
                continue
            if also_over or not self.over_at(worker):
                yield ToWorker(worker, Cancel(self.key, reason))
                if self.taken_over is not None and worker == prefill:
                    yield ToWorker(worker, Cancel(self.taken_over, reason))

    def record(self) -> GenerationRecord:
        """As it stands now."""
        report = self.prefill_report
        return GenerationRecord(
            generation=self.key.generation,
            started_ms=self.started_ms,
            prefill=self.prefill.incarnation,
            decode=self.decode.incarnation,
            reason=self.reason,
            num_prompt_tokens=self.base,
            expected_hit_tokens=self.expected_hit_tokens,
            hit_tokens=report.hit_tokens if report else None,
            computed_tokens=report.computed_tokens if report else None,
            pulled_tokens=report.pulled_tokens if report else None,
            prefill_ms=self.prefill_ms,
            transfer=self.transfer,
            pull=self.pull,
            num_tokens=self.num_tokens,
            cause=self.cause,
        )


class RoutedRequest:
    """One client request: its tokens, its generations, what went wrong so far.

    Attributes:
        stream: its tokens.
        hashes: chain values of the full hash blocks of ``stream.tokens``, when last extended.
        avoid: what the next plan should not repeat.
        killers: workers lost while it had a part there.
        progress_ms: when something last went forward.
        current: the only generation whose messages count; set by `start`.
    """

    current: Generation

    def __init__(self, now_ms: int, request: NewRequest) -> None:
        sampling = request.sampling
        self.request_id = request.request_id
        self.cache_salt = request.cache_salt
        self.sampling = sampling
        self.hashes = list(request.hashes)
        self.stream = TokenStream(
            request.token_ids, sampling.max_tokens, sampling.num_logprobs is not None
        )
        self.exclusions = Exclusions()
        self.killers: set[Incarnation] = set()
        self.generations: list[Generation] = []
        self.progress_ms = now_ms
        self._num_computed_tokens = 0
        self.submitted_ms = now_ms
        self.first_token_ms: int | None = None
        self.finished_ms: int | None = None
        self.num_tokens = 0
        self.outcome = ""
        self.error = ""

    def start(self, now_ms: int, generation: int, plan: Plan) -> list[RouterAction]:
        """Begin a generation after the accepted tokens; returns its submits."""
        self.stream.restart()
        self.progress_ms = now_ms
        self._num_computed_tokens = 0
        old = self.current.key if plan.takes_over else None
        current = Generation(
            key=RequestKey(self.request_id, generation),
            started_ms=now_ms,
            prefill=plan.prefill.view.info,
            decode=plan.decode.view.info,
            reason=plan.reason,
            expected_hit_tokens=plan.prefill.hit.usable_tokens,
            base=len(self.stream.tokens),
            taken_over=old,
        )
        self.generations.append(current)
        self.current = current
        submit = Submit(
            key=current.key,
            role=Role.LOCAL,
            token_ids=tuple(self.stream.tokens),
            hashes=tuple(self.hashes),
            cache_salt=self.cache_salt,
            sampling=replace(self.sampling, max_tokens=self.stream.end - current.base),
        )
        if old is not None:
            take = replace(submit, role=Role.DECODE, peer=_address(current.prefill), take_over=old)
            return [ToWorker(current.decode.incarnation, take)]
        pull = None
        if plan.pull is not None:
            owner = _address(plan.pull.view.info)
            pull = PullPlan(owner, plan.pull.hit.usable_tokens)
        if plan.local:
            return [ToWorker(current.decode.incarnation, replace(submit, pull=pull))]
        # The decode worker first: it refuses a Reserve of a generation it has not been told of.
        return [
            ToWorker(info.incarnation, replace(submit, role=role, peer=_address(peer), pull=first))
            for info, role, peer, first in (
                (current.decode, Role.DECODE, current.prefill, None),
                (current.prefill, Role.PREFILL, current.decode, pull),
            )
        ]

    def computed(self, now_ms: int, num_computed_tokens: int) -> None:
        """Positions that a prefill has computed: progress only above the highest so far.

        Since the last token or plan, that is: who is preempted while it decodes computes again.
        Work that is done over and over, each time lost, does not renew for ever.
        """
        if self._num_computed_tokens < num_computed_tokens <= len(self.stream.tokens):
            self._num_computed_tokens = num_computed_tokens
            self.progress_ms = now_ms

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
        self.hashes.clear()
        self.stream.restart()
        self.stream.tokens = []

    def record(self) -> RequestRecord:
        """As it stands now."""
        return RequestRecord(
            request_id=self.request_id,
            num_prompt_tokens=self.stream.num_prompt_tokens,
            submitted_ms=self.submitted_ms,
            first_token_ms=self.first_token_ms,
            finished_ms=self.finished_ms,
            num_tokens=self.num_tokens,
            generations=tuple(generation.record() for generation in self.generations),
            outcome=self.outcome,
            error=self.error,
        )


def _address(info: WorkerInfo) -> PeerAddress:
    return PeerAddress(info.incarnation, info.address)
