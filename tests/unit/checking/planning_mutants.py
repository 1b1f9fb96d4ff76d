"""Routers, and workers, with one rule of planning anew taken away each."""

from dataclasses import replace

from disagg.messages.identity import Incarnation
from disagg.messages.outputs import SequenceOutput, StepOutputs
from disagg.messages.peer import Seal
from disagg.messages.session import PartEnded
from disagg.messages.submit import Submit
from disagg.routing.actions import RouterAction, ToWorker
from disagg.routing.request_lifecycle import RequestLifecycle
from disagg.routing.token_stream import TokenStream
from disagg.scheduling.actions import ToRouter
from disagg.scheduling.handover.decode_side import DecodeSide
from disagg.scheduling.sequence import Sequence


class OutputsOfAnyGeneration(RequestLifecycle):
    """Tokens are not asked which generation they are of."""

    def output(
        self, now_ms: int, incarnation: Incarnation, output: SequenceOutput
    ) -> list[RouterAction]:
        request = self._live.get(output.key.request_id)
        if request is not None:
            output = replace(output, key=request.current.key)
        return super().output(now_ms, incarnation, output)


class OutputsOfAnyGenerationNext(RequestLifecycle):
    """Nor where they stand, if they are of an old one."""

    def output(
        self, now_ms: int, incarnation: Incarnation, output: SequenceOutput
    ) -> list[RouterAction]:
        request = self._live.get(output.key.request_id)
        if request is not None and request.current.key != output.key:
            position = len(request.stream.tokens)
            output = replace(output, key=request.current.key, position=position)
        return super().output(now_ms, incarnation, output)


class EndsOfAnyGeneration(RequestLifecycle):
    """The end of a part counts, whatever generation it was a part of."""

    def part_ended(
        self, now_ms: int, incarnation: Incarnation, ended: PartEnded
    ) -> list[RouterAction]:
        request = self._live.get(ended.key.request_id)
        if request is not None:
            ended = replace(ended, key=request.current.key)
        return super().part_ended(now_ms, incarnation, ended)


class ForgetsAcceptedTokens(RequestLifecycle):
    """A new plan begins with the client's prompt again."""

    def _begin(self, now_ms, request, plan):  # type: ignore[no-untyped-def]
        num_prompt = request.stream.num_prompt_tokens
        prompt = tuple(request.stream.tokens[:num_prompt])
        actions: list[RouterAction] = []
        for action in super()._begin(now_ms, request, plan):
            if isinstance(action, ToWorker) and isinstance(action.message, Submit):
                sampling = replace(request.sampling, max_tokens=request.stream.end - num_prompt)
                again = replace(action.message, token_ids=prompt, hashes=(), sampling=sampling)
                action = replace(action, message=again)
            actions.append(action)
        return actions


class TellsNobodyOfTheNewPlan(RequestLifecycle):
    """What is planned anew is cancelled nowhere."""

    def _replan(self, now_ms, request, cause, message, plan=None, *, leased=False):  # type: ignore[no-untyped-def]
        self.__dict__["_silent"] = True
        try:
            return super()._replan(now_ms, request, cause, message, plan, leased=leased)
        finally:
            del self.__dict__["_silent"]

    def _cancels(self, request, reason, *, also_over=True, keeps_lease=False):  # type: ignore[no-untyped-def]
        if "_silent" in self.__dict__:
            return []
        return super()._cancels(request, reason, also_over=also_over, keeps_lease=keeps_lease)


class TellsNobodyOfTheEnd(RequestLifecycle):
    """What has all its tokens is cancelled nowhere."""

    def _cancels(self, request, reason, *, also_over=True, keeps_lease=False):  # type: ignore[no-untyped-def]
        if not also_over:
            return []
        return super()._cancels(request, reason, also_over=also_over, keeps_lease=keeps_lease)


class NumbersNothing(RequestLifecycle):
    """Every plan is generation 1."""

    def _begin(self, now_ms, request, plan):  # type: ignore[no-untyped-def]
        self._last_generation = 0
        return super()._begin(now_ms, request, plan)


class KeepsEarlyTokens(TokenStream):
    """What came too early for an old plan stays for the new one."""

    def restart(self) -> None:
        self._finish = None


class WithEarlyTokens(RequestLifecycle):
    """Streams of this kind."""

    def _begin(self, now_ms, request, plan):  # type: ignore[no-untyped-def]
        request.stream.__class__ = KeepsEarlyTokens
        return super()._begin(now_ms, request, plan)


class MovesAgain(RequestLifecycle):
    """What went on elsewhere does so with every report of a worker that has stalled."""

    def stalled(self, now_ms: int, incarnation: Incarnation) -> list[RouterAction]:
        for request in self._live:
            request.has_stalled = False
        return super().stalled(now_ms, incarnation)


class SeesNoGaps(RequestLifecycle):
    """A token that its prefill worker took along is waited for."""

    def _check_gap(self, now_ms, request):  # type: ignore[no-untyped-def]
        return []


class SendsToken0Once(DecodeSide):
    """The decode worker does not send token 0 again."""

    def _emit_first_token(self, seq: Sequence, seal: Seal) -> None:
        before = self._out.take()
        super()._emit_first_token(seq, seal)
        for action in (*before, *self._out.take()):
            if not (isinstance(action, ToRouter) and isinstance(action.message, StepOutputs)):
                self._out.add(action)
