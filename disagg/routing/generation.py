"""One try of a request: a plan that was submitted and what came of it."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.outputs import SequenceOutput
from disagg.messages.registration import WorkerInfo
from disagg.messages.reports import PrefillReport, TransferKind, TransferReport
from disagg.messages.session import Cancel, PartEnded
from disagg.routing.actions import ToWorker
from disagg.routing.estimates.considered import Considered
from disagg.routing.estimates.estimate import Estimate
from disagg.routing.record import GenerationRecord


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
    """Number of tokens before it, and so the position of its first new one."""
    estimate: Estimate | None = None
    considered: tuple[Considered, ...] = ()
    """What was weighed when it was planned."""
    taken_over: RequestKey | None = None
    """The generation whose lease the decode worker takes over; nothing is prefilled then."""
    transferred: bool = False
    """The decode worker has its KV: what the prefill worker does is over."""
    prefill_gone: bool = False
    """Its stream ended after that: a token it still owed comes from the decode worker or never."""
    kept_at: Incarnation | None = None
    """Who ended its decode, and keeps the KV of it for another one."""
    num_kept_tokens: int = 0
    received_at: set[Incarnation] = field(default_factory=set)
    """Workers that have said that its submit has come."""
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

    def info_of(self, worker: Incarnation) -> WorkerInfo:
        """Registration of a worker that has a part in this generation."""
        return self.decode if worker == self.decode.incarnation else self.prefill

    def saw_output(self, worker: Incarnation, output: SequenceOutput) -> None:
        """Note from a worker's tokens whose part is over: the sender's, or the prefill worker's."""
        if output.finish_reason:
            self.finished_at.add(worker)
        if self.transferred:
            return
        if (
            worker == self.decode.incarnation
            and output.position + len(output.token_ids) > self.base + 1
        ):
            self.transferred = True

    @property
    def num_tokens_to_prefill(self) -> int:
        """Tokens that are still to be computed before its first one, as far as the router knows."""
        if self.num_tokens or self.taken_over is not None:
            return 0
        return max(1, self.base - self.expected_hit_tokens)

    @property
    def lease_tokens(self) -> int | None:
        """Tokens under a sealed lease without a reader of use; None where there is none.

        It is the prefill worker's, once the prefill is complete and until it is handed over; or
        that of a worker that was about to end.
        """
        if self.kept_at is not None:
            return self.num_kept_tokens
        if self.local or self.transferred or self.prefill_gone:
            return None
        if self.taken_over is not None:
            return self.base - 1
        return self.base if self.prefill_report is not None else None

    def keeps(self, worker: Incarnation, ended: PartEnded) -> bool:
        """Whether its decode worker, which ended its part, keeps the KV for another one."""
        if worker != self.decode.incarnation or not ended.num_kept_tokens:
            return False
        self.kept_at, self.num_kept_tokens = worker, ended.num_kept_tokens
        return True

    @property
    def lease_owner(self) -> WorkerInfo:
        """Whose lease that is."""
        return self.prefill if self.kept_at is None else self.info_of(self.kept_at)

    def accepts(
        self, now_ms: int, worker: Incarnation, report: PrefillReport | TransferReport
    ) -> bool:
        """Keep a report; False, and nothing changed, for a repeated one or another worker's."""
        prefill, decode = self.prefill.incarnation, self.decode.incarnation
        if isinstance(report, PrefillReport):
            if worker != prefill or self.prefill_report is not None:
                return False
            self.prefill_report, self.prefill_ms = report, now_ms
        elif report.kind is TransferKind.PREFIX:
            if worker != prefill or self.pull is not None:
                return False
            self.pull = report
        else:
            if worker != decode or self.transfer is not None:
                return False
            self.transfer, self.transferred = report, True
        return True

    def over_at(self, worker: Incarnation) -> bool:
        """Whether the worker's part is over, so that it holds nothing for this generation."""
        return worker in self.finished_at or (
            self.transferred and not self.local and worker == self.prefill.incarnation
        )

    def awaited(self) -> Iterator[Incarnation]:
        """Workers that still have to do something for this generation."""
        return (worker for worker in self.workers if not self.over_at(worker))

    def cancels(
        self, reason: str, *, also_over: bool, keeps_lease: bool = False
    ) -> Iterator[ToWorker]:
        """``Cancel`` for every part, or for those that may still hold something.

        With ``keeps_lease`` the owner of the lease is not cancelled: another one takes it over.
        """
        prefill, owner = self.prefill.incarnation, self.lease_owner.incarnation
        for worker in self.workers:
            if keeps_lease and worker == owner:
                continue
            if also_over or not self.over_at(worker):
                yield ToWorker(worker, Cancel(self.key, reason))
                if self.taken_over is not None and worker == prefill:
                    yield ToWorker(worker, Cancel(self.taken_over, reason))

    def record(self) -> GenerationRecord:
        """A copy of what is known of this generation, in plain types."""
        report = self.prefill_report
        return GenerationRecord(
            generation=self.key.generation,
            started_ms=self.started_ms,
            prefill=self.prefill.incarnation,
            decode=self.decode.incarnation,
            prefill_role=self.prefill.role,
            decode_role=self.decode.role,
            reason=self.reason,
            num_prompt_tokens=self.base,
            expected_hit_tokens=self.expected_hit_tokens,
            hit_tokens=report.hit_tokens if report else None,
            computed_tokens=report.computed_tokens if report else None,
            pulled_tokens=report.pulled_tokens if report else None,
            uncached_common_tokens=report.uncached_common_tokens if report else None,
            prefill_ms=self.prefill_ms,
            prefill_times=report.times if report else None,
            transfer=self.transfer,
            pull=self.pull,
            num_tokens=self.num_tokens,
            cause=self.cause,
            estimate=self.estimate,
            considered=self.considered,
        )
