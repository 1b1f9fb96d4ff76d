"""All requests: planned, followed token by token, planned anew, ended."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from disagg.errors import (
    CapacityError,
    DisaggError,
    ExpiredError,
    ProtocolError,
    RemoteFault,
    RequestError,
)
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.outputs import SequenceOutput
from disagg.messages.session import (
    EndReason,
    PartEnded,
    PrefillProgress,
    PrefillReport,
    TransferKind,
    TransferReport,
)
from disagg.routing.actions import Deliver, Fail, NewRequest, RouterAction
from disagg.routing.exclusions import TRANSFER_FAULTS
from disagg.routing.fleet import Fleet
from disagg.routing.policy import Candidate, Plan, choose, choose_take_over
from disagg.routing.record import RequestRecord
from disagg.routing.request import RoutedRequest

HashExtend = Callable[[list[bytes], Sequence[int], bytes], None]
AHEAD_MAX = 1024
"""Tokens of a request that may wait for one before them."""
KILLS_MAX = 2
"""Workers that may be lost under a request before it is refused as poison."""
_NO_ROOM = (EndReason.CAPACITY, EndReason.RESERVE_REFUSED)


class RequestTable:
    """Live requests and the records of ended ones; see `RouterCore` for the arguments."""

    def __init__(
        self,
        fleet: Fleet,
        counters: Counter[tuple[str, str]],
        *,
        hash_extend: HashExtend,
        replans_max: int,
        requests_max: int,
        request_timeout_ms: int,
        records_max: int,
        pull_tokens_min: int,
    ) -> None:
        self.counters = counters
        self._fleet = fleet
        self._hash_extend = hash_extend
        self._replans_max = replans_max
        self._requests_max = requests_max
        self._request_timeout_ms = request_timeout_ms
        self._records_max = records_max
        self._pull_tokens_min = pull_tokens_min
        self._live: dict[str, RoutedRequest] = {}
        self._ended: OrderedDict[str, RoutedRequest] = OrderedDict()
        # Counted over all requests, so that a request id used twice never repeats a key.
        self._last_generation = 0

    def __len__(self) -> int:
        return len(self._live)

    def num_live(self) -> Counter[Incarnation]:
        """Live generations per worker."""
        return Counter(
            worker for request in self._live.values() for worker in request.current.workers
        )

    def generate(self, now_ms: int, request: NewRequest) -> list[RouterAction]:
        """See `RouterCore.generate`."""
        if request.request_id in self._live:
            raise RequestError(
                "a request with this id is being served",
                param="request_id",
                request_id=request.request_id,
            )
        for field, bad in (
            ("prompt", not request.token_ids),
            ("max_tokens", request.sampling.max_tokens < 1),
        ):
            if bad:
                raise RequestError(f"{field} is empty", param=field, request_id=request.request_id)
        contract = self._fleet.contract
        if contract and len(request.hashes) * contract.hash_block_tokens > len(request.token_ids):
            # Surplus hashes would publish blocks under names that are not theirs.
            raise RequestError(
                f"{len(request.hashes)} hashes are more than {len(request.token_ids)} tokens fill",
                param="hashes",
                request_id=request.request_id,
            )
        if len(self._live) >= self._requests_max:
            self.counters["requests_refused", "capacity"] += 1
            raise CapacityError(
                f"{self._requests_max} requests are being served", request_id=request.request_id
            )
        routed = RoutedRequest(now_ms, request)
        actions = self._plan(now_ms, routed)
        self._live[request.request_id] = routed
        self.counters["requests", ""] += 1
        return actions

    def cancel(self, now_ms: int, request_id: str, reason: str) -> list[RouterAction]:
        """See `RouterCore.cancel`."""
        request = self._live.get(request_id)
        if request is None:
            return []
        actions = self._cancels(request, reason)
        self._end(now_ms, request, "cancelled", reason)
        return actions

    def output(
        self, now_ms: int, incarnation: Incarnation, output: SequenceOutput
    ) -> list[RouterAction]:
        """Tokens from a worker."""
        request = self._concerned(incarnation, output.key)
        if request is None:
            self.counters["late_messages", ""] += 1
            return []
        try:
            extension = request.stream.accept(output)
        except ProtocolError as error:
            self.counters["protocol_errors", ""] += 1
            return self._fail(now_ms, request, error)
        generation = request.current
        generation.saw_output(incarnation, output)
        if extension is None:
            return self._check_gap(now_ms, request)
        request.delivered(now_ms, len(extension.token_ids))
        self.counters["tokens", ""] += len(extension.token_ids)
        actions: list[RouterAction] = [
            Deliver(
                request.request_id,
                extension.token_ids,
                extension.logprobs,
                extension.finish_reason,
            )
        ]
        if extension.finish_reason:
            actions += self._cancels(request, "finished", also_over=False)
            self._end(now_ms, request, str(extension.finish_reason))
            return actions
        return actions + self._check_gap(now_ms, request)

    def part_ended(
        self, now_ms: int, incarnation: Incarnation, ended: PartEnded
    ) -> list[RouterAction]:
        """A worker gave its part up."""
        request = self._concerned(incarnation, ended.key)
        if request is None:
            self.counters["late_messages", ""] += 1
            return []
        generation = request.current
        if ended.reason is EndReason.REJECTED:
            return self._fail(now_ms, request, RequestError(ended.message or "not servable here"))
        if generation.over_at(incarnation):
            return self._prefill_gone(now_ms, request, incarnation)
        prefill, decode = generation.prefill.incarnation, generation.decode.incarnation
        request.exclusions.learn(ended.reason, incarnation, prefill, decode)
        if ended.reason in TRANSFER_FAULTS and not generation.local:
            self._fleet.mark_bad_pair(now_ms, prefill, decode)
        linkless = ended.reason is EndReason.PEER_LOST and incarnation == decode
        return self._replan(
            now_ms, request, ended.reason.value, ended.message, decode_lost=linkless
        )

    def progress(self, now_ms: int, incarnation: Incarnation, progress: PrefillProgress) -> None:
        """A prefill went on: the request's patience begins again when the figure grew."""
        request = self._concerned(incarnation, progress.key)
        if request is None:
            self.counters["late_messages", ""] += 1
            return
        request.computed(now_ms, progress.num_computed_tokens)

    def report(
        self, now_ms: int, incarnation: Incarnation, report: PrefillReport | TransferReport
    ) -> None:
        """Note it, also for a request that ended meanwhile: only its record changes then."""
        request_id = report.key.request_id
        request = self._live.get(request_id) or self._ended.get(request_id)
        if request is None or request.current.key != report.key:
            return
        generation = request.current
        if isinstance(report, TransferReport) and report.kind is TransferKind.PREFIX:
            if incarnation == generation.prefill.incarnation and not generation.pull:
                generation.pull = report
                self._count_pull(report)
        elif isinstance(report, TransferReport):
            if incarnation == generation.decode.incarnation and not generation.transfer:
                generation.transfer = report
                generation.transferred = True
                for group in report.groups:
                    self.counters["pulled_bytes", group.kind] += group.pulled_bytes
                    self.counters["full_bytes", group.kind] += group.full_bytes
        elif incarnation == generation.prefill.incarnation and not generation.prefill_report:
            generation.prefill_report = report
            generation.prefill_ms = now_ms
            self.counters["prefill_tokens", "hit"] += report.hit_tokens
            self.counters["prefill_tokens", "pulled"] += report.pulled_tokens
            self.counters["prefill_tokens", "computed"] += report.computed_tokens
        request.progress_ms = now_ms

    def lost(self, now_ms: int, incarnation: Incarnation, cause: str) -> list[RouterAction]:
        """Every live request that needs this worker goes on elsewhere."""
        self.counters["workers_lost", cause] += 1
        actions: list[RouterAction] = []
        for request in list(self._live.values()):
            generation = request.current
            if incarnation not in generation.workers:
                continue
            if generation.over_at(incarnation) and incarnation != generation.decode.incarnation:
                actions += self._prefill_gone(now_ms, request, incarnation)
                continue
            request.killers.add(incarnation)
            if len(request.killers) >= KILLS_MAX:
                self.counters["poison", ""] += 1
                names = ", ".join(sorted(worker.worker_id for worker in request.killers))
                error = RemoteFault(
                    f"{len(request.killers)} workers were lost while they served this request "
                    f"({names}); it is not tried on another one"
                )
                actions += self._fail(now_ms, request, error)
                continue
            request.exclusions.local_on = None
            actions += self._replan(
                now_ms,
                request,
                "worker_lost",
                f"{incarnation.worker_id}: {cause}",
                decode_lost=incarnation == generation.decode.incarnation,
            )
        return actions

    def expire(self, now_ms: int) -> list[RouterAction]:
        """Fail requests that made no progress for too long."""
        actions: list[RouterAction] = []
        for request in list(self._live.values()):
            waited_ms = now_ms - request.progress_ms
            if waited_ms > self._request_timeout_ms:
                error = ExpiredError(f"no progress for {waited_ms} ms")
                actions += self._fail(now_ms, request, error)
        return actions

    def record(self, request_id: str) -> RequestRecord | None:
        """Of a live or recently ended request."""
        request = self._live.get(request_id) or self._ended.get(request_id)
        return None if request is None else request.record()

    # --- inside

    def _plan(self, now_ms: int, request: RoutedRequest) -> list[RouterAction]:
        """Choose workers and begin a generation; nothing has changed when it raises."""
        tokens = request.stream.tokens
        candidates = self._candidates(request)
        try:
            plan = choose(
                candidates,
                len(tokens),
                request.stream.end,
                request.exclusions,
                self._fleet.bad_pairs(now_ms),
                pull_tokens_min=self._pull_tokens_min,
            )
        except DisaggError as error:
            error.request_id = request.request_id
            raise
        return self._begin(now_ms, request, plan)

    def _candidates(self, request: RoutedRequest) -> list[Candidate]:
        hits = self._fleet.match(len(request.stream.tokens), request.hashes)
        views = [view for view in self._fleet.views() if view.ready]
        return [Candidate(view, hits[view.info.incarnation]) for view in views]

    def _begin(self, now_ms: int, request: RoutedRequest, plan: Plan) -> list[RouterAction]:
        self._last_generation += 1
        actions = request.start(now_ms, self._last_generation, plan)
        if not plan.takes_over:
            to_compute = len(request.stream.tokens) - (plan.pull or plan.prefill).hit.usable_tokens
            self._fleet.planned(plan.prefill.incarnation, to_compute)
        if not plan.local:
            self._fleet.planned(plan.decode.incarnation, 0)
        kind = "take_over" if plan.takes_over else "local" if plan.local else "handover"
        self.counters["plans", kind] += 1
        return actions

    def _take_over(self, now_ms: int, request: RoutedRequest) -> Plan | None:
        """Another decode worker for a sealed prompt whose decode worker was lost too early.

        Only where token 0, which came with the seal, is all that was accepted.
        """
        lost = request.current
        if lost.lease_tokens is None or len(request.stream.tokens) != lost.lease_tokens + 1:
            return None
        return choose_take_over(
            self._candidates(request),
            lost.prefill.incarnation,
            lost.decode.incarnation,
            len(request.stream.tokens),
            request.stream.end,
            request.exclusions,
            self._fleet.bad_pairs(now_ms),
        )

    def _count_pull(self, report: TransferReport) -> None:
        cause = report.failed.partition(":")[0] if report.failed else "committed"
        self.counters["prefix_pulls", cause] += 1
        for group in report.groups:
            self.counters["prefix_pulled_bytes", group.kind] += group.pulled_bytes

    def _check_gap(self, now_ms: int, request: RoutedRequest) -> list[RouterAction]:
        """Tokens that wait for one that will not come, or too many of them: plan anew."""
        num_ahead = request.stream.num_ahead
        if not num_ahead:
            return []
        generation = request.current
        # One stream keeps its order, so a gap in it stays; two streams may cross.
        one_stream = generation.local or generation.prefill_gone
        if num_ahead > (0 if one_stream else AHEAD_MAX):
            return self._replan(now_ms, request, "gap", f"{num_ahead} tokens wait for a lost one")
        return []

    def _prefill_gone(
        self, now_ms: int, request: RoutedRequest, incarnation: Incarnation
    ) -> list[RouterAction]:
        """A part that was over anyway is gone; only a token it still owed can be missing."""
        if incarnation != request.current.prefill.incarnation:
            return []
        request.current.prefill_gone = True
        return self._check_gap(now_ms, request)

    def _replan(
        self,
        now_ms: int,
        request: RoutedRequest,
        cause: str,
        message: str,
        *,
        decode_lost: bool = False,
    ) -> list[RouterAction]:
        """Give the current generation up and go on after the accepted tokens."""
        last_try = len(request.generations) > self._replans_max
        plan = self._take_over(now_ms, request) if decode_lost and not last_try else None
        actions = self._cancels(request, cause, keeps_lease=plan is not None)
        request.current.cause = f"{cause}: {message}" if message else cause
        self.counters["replans", cause] += 1
        if last_try:
            kind = CapacityError if cause in _NO_ROOM and not request.num_tokens else RemoteFault
            error: DisaggError = kind(
                f"given up after {len(request.generations)} plans, at last for "
                f"{request.current.cause}"
            )
            return actions + self._finish_failed(now_ms, request, error)
        self._hash_extend(request.hashes, request.stream.tokens, request.cache_salt)
        if plan is not None:
            return actions + self._begin(now_ms, request, plan)
        try:
            return actions + self._plan(now_ms, request)
        except DisaggError as failure:
            return actions + self._finish_failed(now_ms, request, failure)

    def _cancels(
        self,
        request: RoutedRequest,
        reason: str,
        *,
        also_over: bool = True,
        keeps_lease: bool = False,
    ) -> list[RouterAction]:
        """To every worker of the current generation that still can be told."""
        current = request.current
        return [
            action
            for action in current.cancels(reason, also_over=also_over, keeps_lease=keeps_lease)
            if action.worker in self._fleet
        ]

    def _fail(self, now_ms: int, request: RoutedRequest, error: DisaggError) -> list[RouterAction]:
        return self._cancels(request, error.code) + self._finish_failed(now_ms, request, error)

    def _finish_failed(
        self, now_ms: int, request: RoutedRequest, error: DisaggError
    ) -> list[RouterAction]:
        error.request_id = request.request_id
        self._end(now_ms, request, "failed", f"{type(error).__name__}: {error.message}")
        return [Fail(request.request_id, error)]

    def _end(self, now_ms: int, request: RoutedRequest, outcome: str, error: str = "") -> None:
        del self._live[request.request_id]
        request.end(now_ms, outcome, error)
        self.counters["requests_ended", outcome] += 1
        self._ended.pop(request.request_id, None)
        self._ended[request.request_id] = request
        while len(self._ended) > self._records_max:
            self._ended.popitem(last=False)

    def _concerned(self, incarnation: Incarnation, key: RequestKey) -> RoutedRequest | None:
        """The live request whose current generation this is, and the worker has a part in it."""
        request = self._live.get(key.request_id)
        if request is None or request.current.key != key:
            return None
        return request if incarnation in request.current.workers else None
