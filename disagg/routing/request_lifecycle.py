"""A request from its first plan on: followed token by token, planned anew, ended."""

from collections import Counter

from disagg.errors import (
    CapacityError,
    DisaggError,
    ExpiredError,
    ProtocolError,
    RequestError,
)
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.outputs import PromptLogprobs, SequenceOutput
from disagg.messages.reports import PrefillReport, TransferReport
from disagg.messages.session import EndReason, PartEnded, PrefillProgress
from disagg.routing.actions import Deliver, Fail, RouterAction
from disagg.routing.end_pace import EndPace
from disagg.routing.exclusions import TRANSFER_FAULTS, first_cause
from disagg.routing.fair_queue import FairQueue
from disagg.routing.fleet import Fleet, LostWorker
from disagg.routing.live_requests import LiveRequests
from disagg.routing.planner import Planner
from disagg.routing.policy.protocol import Plan
from disagg.routing.report_counters import count_report
from disagg.routing.request import PREEMPTED, RoutedRequest

AHEAD_MAX = 1024
"""Tokens of a request that may wait for one before them."""


class RequestLifecycle:
    """What becomes of requests once they are planned; see `RouterCore` for the other arguments.

    Args:
        live: the requests, which begin and end here.
        turns: charged with what tenants are served.
        pace: at which requests end.
    """

    def __init__(
        self,
        fleet: Fleet,
        planner: Planner,
        live: LiveRequests,
        turns: FairQueue[RoutedRequest],
        pace: EndPace,
        counters: Counter[tuple[str, str]],
        *,
        replans_max: int,
        request_timeout_ms: int,
        worker_stalled_ms: int,
    ) -> None:
        self.counters = counters
        self._fleet = fleet
        self._replans_max = replans_max
        self._request_timeout_ms = request_timeout_ms
        self._worker_stalled_ms = worker_stalled_ms
        self._planner = planner
        self._live = live
        self._turns = turns
        self._pace = pace
        # Counted over all requests, so that a request id used twice never repeats a key.
        self._last_generation = 0

    def begin(self, now_ms: int, request: RoutedRequest, plan: Plan) -> list[RouterAction]:
        """Submit a request that has not begun yet."""
        self._live.add(now_ms, request)
        return self._begin(now_ms, request, plan)

    def cancel(self, now_ms: int, request_id: str, reason: str) -> list[RouterAction]:
        """See `RouterCore.cancel`."""
        request = self._live.get(request_id)
        if request is None:
            return []
        actions = self._cancels(request, reason)
        self._live.end(now_ms, request, "cancelled", reason)
        return actions

    def fail(self, now_ms: int, request_id: str, error: DisaggError) -> list[RouterAction]:
        """End a live request, at its workers as well."""
        request = self._live.get(request_id)
        return self._fail(now_ms, request, error) if request is not None else []

    def superseded(
        self, now_ms: int, incarnation: Incarnation, key: RequestKey, error: DisaggError
    ) -> list[RouterAction]:
        """End the request that was claimed under a key, if it was claimed at that worker."""
        request = self._live.get(key.request_id)
        if request is None or not request.was_claimed(incarnation, key.generation):
            return []
        return self._fail(now_ms, request, error)

    def output(
        self, now_ms: int, incarnation: Incarnation, output: SequenceOutput
    ) -> list[RouterAction]:
        """Take tokens of a worker; deliver what is in order, plan anew or fail what cannot be."""
        request = self._concerned(incarnation, output.key)
        if request is None:
            return []
        try:
            delivery = request.stream.accept(output)
        except ProtocolError as error:
            self.counters["protocol_errors", ""] += 1
            return self._fail(now_ms, request, error)
        generation = request.current
        if output.finish_reason or not generation.transferred:
            generation.saw_output(incarnation, output)
        if delivery is not None:
            return self._delivered(now_ms, request, delivery)
        if not request.stream.scores.complete and incarnation == generation.prefill.incarnation:
            # Its stream keeps its order: what it has not said of the prompt it never will.
            said = "tokens came before the prompt's log-probabilities"
            return self._replan(now_ms, request, "gap", said)
        return self._check_gap(now_ms, request)

    def scored(
        self, now_ms: int, incarnation: Incarnation, scored: PromptLogprobs
    ) -> list[RouterAction]:
        """Take what a worker says of a prompt; tokens may have waited for it."""
        request = self._concerned(incarnation, scored.key)
        if request is None:
            return []
        try:
            if incarnation != request.current.prefill.incarnation:
                raise ProtocolError("prompt logprobs came from who did not compute the prompt")
            delivery = request.stream.score(scored)
        except ProtocolError as error:
            self.counters["protocol_errors", ""] += 1
            return self._fail(now_ms, request, error)
        request.computed(now_ms, scored.position + len(scored.logprobs))
        return [] if delivery is None else self._delivered(now_ms, request, delivery)

    def _delivered(
        self, now_ms: int, request: RoutedRequest, delivery: Deliver
    ) -> list[RouterAction]:
        """Deliver what became deliverable; plan anew where what lacks will not come."""
        num = len(delivery.token_ids)
        is_first = not request.current.num_tokens
        request.delivered(now_ms, num)
        if is_first:  # its prompt is computed
            self._live.has_freed = True
            self._fleet.count(request.request_id, request.current)
        self._turns.charge(request.tenant, num)
        self.counters["tokens", ""] += num
        actions: list[RouterAction] = [delivery]
        if delivery.finish_reason:
            actions += self._cancels(request, "finished", also_over=False)
            self._live.end(now_ms, request, str(delivery.finish_reason))
            return actions
        return actions + self._check_gap(now_ms, request) if request.stream.num_ahead else actions

    def part_ended(
        self, now_ms: int, incarnation: Incarnation, ended: PartEnded
    ) -> list[RouterAction]:
        """A worker ended its part early: plan the request anew where that matters, or fail it."""
        request = self._concerned(incarnation, ended.key)
        if request is None:
            return []
        generation = request.current
        if generation.over_at(incarnation):
            return self._prefill_gone(now_ms, request, incarnation)
        if ended.reason is EndReason.REJECTED:
            # A larger worker may serve it. Each rejection raises the bound, so this ends.
            size = generation.info_of(incarnation).max_model_tokens
            request.outgrown_tokens = max(request.outgrown_tokens, size)
            return self._replan(now_ms, request, ended.reason.value, ended.message)
        cause = first_cause(ended)
        if cause is EndReason.NO_TOKEN:  # it would end so anywhere
            said = ended.message if ended.reason is cause else "no token can follow"
            return self._fail(now_ms, request, RequestError(said, param="response_format"))
        prefill, decode = generation.prefill.incarnation, generation.decode.incarnation
        request.exclusions.learn(cause, ended_by=incarnation, prefill=prefill, decode=decode)
        if cause in TRANSFER_FAULTS and not generation.local:
            stuck = cause is EndReason.READ_STUCK
            self._fleet.bad_pairs.failed(now_ms, prefill, decode, stuck=stuck)
        leased = incarnation == decode and ended.reason is EndReason.PEER_LOST
        leased |= generation.keeps(incarnation, ended)
        return self._replan(now_ms, request, ended.reason.value, ended.message, leased=leased)

    def progress(
        self, now_ms: int, incarnation: Incarnation, progress: PrefillProgress
    ) -> list[RouterAction]:
        """A prefill or a transfer went on: patience begins again when the figure grew.

        Without a figure it is the receipt of a submit, or it was preempted.
        """
        request = self._concerned(incarnation, progress.key)
        if not progress.num_computed_tokens:
            if request is not None:
                request.current.received_at.add(incarnation)
            self._live.has_freed |= self._fleet.received(incarnation, progress.key.generation)
        if request is None:
            return []
        if progress.preempted:
            return self._preempted(now_ms, request, incarnation)
        request.computed(now_ms, progress.num_computed_tokens)
        return []

    def report(
        self, now_ms: int, incarnation: Incarnation, report: PrefillReport | TransferReport
    ) -> None:
        """Keep a report; of a request that ended meanwhile only the record changes."""
        request = self._live.find(report.key.request_id)
        if request is None or request.current.key != report.key:
            return
        if request.current.accepts(now_ms, incarnation, report):
            request.reported(now_ms)
            count_report(self.counters, report)
            self._fleet.speeds.report(request.current, report)

    def lost(self, now_ms: int, lost: LostWorker, cause: str) -> list[RouterAction]:
        """Every live request that needs this worker goes on elsewhere."""
        incarnation = lost.incarnation
        self.counters["workers_lost", cause] += 1
        actions: list[RouterAction] = []
        for request in self._live:
            generation = request.current
            if incarnation not in generation.workers:
                continue
            leased = incarnation == generation.decode.incarnation
            if generation.over_at(incarnation) and not leased:
                actions += self._prefill_gone(now_ms, request, incarnation)
                continue
            if poison := request.lost(lost):
                self.counters["poison", ""] += 1
                actions += self._fail(now_ms, request, poison)
                continue
            said = f"{incarnation.worker_id}: {cause}"
            actions += self._replan(now_ms, request, "worker_lost", said, leased=leased)
        return actions

    def stalled(self, now_ms: int, incarnation: Incarnation) -> list[RouterAction]:
        """A worker's step takes too long: after a while its requests go on elsewhere.

        Each does once, or steps that are slow everywhere would use up all its tries.
        """
        actions: list[RouterAction] = []
        if not self._fleet.has_stalled(now_ms, incarnation, self._worker_stalled_ms):
            return actions
        for request in self._live:
            waits = incarnation in request.current.awaited() and not request.has_stalled
            if waits and self._planner.can_go_on_elsewhere(request):
                request.has_stalled = True
                said = f"{incarnation.worker_id}: its step does not end"
                actions += self._replan(now_ms, request, "worker_stalled", said)
        return actions

    def expire(self, now_ms: int) -> list[RouterAction]:
        """Fail requests that made no progress for too long."""
        actions: list[RouterAction] = []
        for request in self._live:
            waited_ms = now_ms - request.progress_ms
            if waited_ms > self._request_timeout_ms:
                error = ExpiredError(
                    f"no progress for {waited_ms} ms, at most {self._request_timeout_ms} are "
                    f"waited for a token or a part of the prompt; {request.current.reason}"
                )
                actions += self._fail(now_ms, request, error)
        return actions

    # --- inside

    def _plan(self, now_ms: int, request: RoutedRequest) -> list[RouterAction]:
        """Choose workers and begin a generation; nothing has changed when it raises."""
        try:
            plan = self._planner.plan(now_ms, request)
        except DisaggError as error:
            error.request_id = request.request_id
            raise
        return self._begin(now_ms, request, plan)

    def _begin(self, now_ms: int, request: RoutedRequest, plan: Plan) -> list[RouterAction]:
        self._last_generation += 1
        submits = request.start(now_ms, self._last_generation, plan)
        self._fleet.count(request.request_id, request.current)
        self._fleet.speeds.answers.begin(request.current.decode.incarnation, request)
        actions = [*request.claims(self._fleet.keepers.of), *submits]
        local = request.current.local
        if not plan.takes_over:
            to_compute = len(request.stream.tokens) - plan.found_tokens
            self._fleet.planned(plan.prefill.incarnation, to_compute, decodes=local)
        if not local:
            self._fleet.planned(plan.decode.incarnation, 0, decodes=True)
        kind = "take_over" if plan.takes_over else "local" if local else "handover"
        self.counters["plans", kind] += 1
        return actions

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

    def _preempted(
        self, now_ms: int, request: RoutedRequest, incarnation: Incarnation
    ) -> list[RouterAction]:
        """It goes on where there is memory to spare; once, or it might go round all of them.

        Where there is none it stays, and goes on before all that have not begun there.
        """
        plan = None
        if incarnation == request.current.decode.incarnation and not request.was_preempted:
            plan = self._planner.relief(now_ms, request)
        if plan is None:
            return []
        request.was_preempted = True
        said = f"{incarnation.worker_id}: no memory for its next token"
        return self._replan(now_ms, request, PREEMPTED, said, plan)

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
        plan: Plan | None = None,
        *,
        leased: bool = False,
    ) -> list[RouterAction]:
        """Give the current generation up and go on after the accepted tokens."""
        last_try = request.num_failed_tries(cause) > self._replans_max
        if leased and not last_try:
            plan = self._planner.take_over(now_ms, request)
        keeps_lease = plan is not None and plan.takes_over
        actions = self._cancels(request, cause, keeps_lease=keeps_lease)
        request.current.cause = f"{cause}: {message}" if message else cause
        self.counters["replans", cause] += 1
        if last_try:
            message = f"given up after {len(request.generations)} plans, at last for "
            return actions + self._give_up(now_ms, request, cause, message + request.current.cause)
        request.extend_hashes()
        if plan is not None:
            return actions + self._begin(now_ms, request, plan)
        try:
            return actions + self._plan(now_ms, request)
        except DisaggError as failure:
            return actions + self._give_up(now_ms, request, cause, failure.message)

    def _give_up(
        self, now_ms: int, request: RoutedRequest, cause: str, message: str
    ) -> list[RouterAction]:
        """No plan is left. What has begun, or has lost its workers, is not the client's fault."""
        return self._finish_failed(now_ms, request, request.error_of(cause, message))

    def _cancels(
        self,
        request: RoutedRequest,
        reason: str,
        *,
        also_over: bool = True,
        keeps_lease: bool = False,
    ) -> list[RouterAction]:
        """``Cancel`` for the current generation's workers that are still in the fleet."""
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
        if isinstance(error, CapacityError):
            error.retry_after_s = self._pace.retry_after_s(now_ms, 1)
        self._live.end(now_ms, request, "failed", f"{type(error).__name__}: {error.message}")
        return [Fail(request.request_id, error)]

    def _concerned(self, incarnation: Incarnation, key: RequestKey) -> RoutedRequest | None:
        """The request that a message is of; counted if it comes too late."""
        request = self._live.concerned(incarnation, key)
        if request is None:
            self.counters["late_messages", ""] += 1
        return request
