"""Trace spans of a worker: the prefill and the decode of a request, and transfers into here.

It watches what passes through the control and changes nothing but the trace context in it: a
span's children are told of it by `Submit`, here within, and by `Reserve`, at the peer.
"""

import os
from dataclasses import dataclass, field, replace

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, StatusCode

from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.outputs import SequenceOutput, StepOutputs
from disagg.messages.peer import Offers, PeerMessage, Release, Reserve
from disagg.messages.reports import PrefillReport, TransferKind, TransferReport
from disagg.messages.session import PartEnded, ToRouterMessage
from disagg.messages.submit import Role, Submit
from disagg.telemetry.exporters import exporter_named_in, tracer_for
from disagg.telemetry.span_clock import SpanClock
from disagg.telemetry.trace_context import context_of, traceparent_of
from disagg.transfer.actions import PostRead
from disagg.workers.options import WorkerOptions
from disagg.workers.transfer_trace import TransferTrace

PREFILL, DECODE = "prefill", "decode"


def trace_of_worker(options: WorkerOptions, me: Incarnation) -> "RequestTrace":
    """What one worker traces, exported as it was told.

    Raises:
        ConfigError: the exporter is not known, or not installed.
    """
    tracer = tracer_for(
        exporter_named_in(os.environ, options.traces),
        "disagg-worker",
        {"service.instance.id": f"{me.worker_id}:{me.epoch}", "disagg.role": options.role},
        options.traces_endpoint,
    )
    return RequestTrace(tracer, options.model_name)


@dataclass(slots=True)
class _Part:
    """This worker's part of one generation."""

    role: Role
    parent: str
    """Trace context of the router's span."""
    transfer_parent: str
    """That of the prefill that a transfer belongs to: here, or as the peer said."""
    span: Span | None = None
    """Of what goes on now; None while the part waits for a hand-over."""
    num_tokens: int = 0
    clock: SpanClock = field(default_factory=SpanClock)


class RequestTrace:
    """Parts in progress, until they end; nothing is kept where nothing is traced."""

    def __init__(self, tracer: trace.Tracer, model_name: str = "") -> None:
        self._tracer = tracer
        self._model_name = model_name
        self._is_on = not isinstance(tracer, trace.NoOpTracer)
        self._parts: dict[RequestKey, _Part] = {}
        self.transfers = TransferTrace(tracer, self._transfer_context)

    @property
    def num_open(self) -> int:
        """Parts and transfers that were begun and have not ended."""
        return len(self._parts) + self.transfers.num_open

    # --- what comes in

    def submitted(self, submit: Submit) -> None:
        """The router submitted a generation: whoever prefills begins."""
        if not self._is_on or submit.key in self._parts:
            return
        part = _Part(submit.role, submit.traceparent, submit.traceparent)
        self._parts[submit.key] = part
        if submit.role is not Role.DECODE:
            part.span = self._begin(PREFILL, submit.key, part)
            part.transfer_parent = traceparent_of(part.span)

    def received(self, sender: Incarnation, message: PeerMessage) -> None:
        """Another worker's message was handled, READs that it led to are posted."""
        if isinstance(message, Offers):
            self.transfers.offered(sender, message)
        elif isinstance(message, Release):
            self.transfers.ended(message.key, "released")
        elif isinstance(message, Reserve) and message.traceparent:
            part = self._parts.get(message.key)
            if part is not None and part.role is Role.DECODE:
                part.transfer_parent = message.traceparent

    def cancelled(self, key: RequestKey, reason: str) -> None:
        """The router cancelled a generation."""
        self.transfers.ended(key, "cancelled", reason)
        self._end(key, "cancelled", reason)

    def forget_router(self, router: str, outcome: str) -> None:
        """Forget a router's generations: all have ended here."""
        self.transfers.forget_router(router, outcome)
        for key in [key for key in self._parts if key.router == router]:
            self._end(key, outcome, outcome)

    # --- what goes out

    def sent(self, message: PeerMessage) -> PeerMessage:
        """A message for another worker, with the trace context if it is one that carries it."""
        if self._is_on and isinstance(message, Reserve) and message.key in self._parts:
            return replace(message, traceparent=self._parts[message.key].transfer_parent)
        return message

    def posted(self, read: PostRead) -> None:
        """A READ of a transfer is posted."""
        self.transfers.posted(read)

    def reported(self, message: ToRouterMessage) -> None:
        """Follow what the router is told: which part goes on, how it ends."""
        self.transfers.reported(message)
        if not self._is_on:
            return
        match message:
            case StepOutputs(outputs):
                for output in outputs:
                    self._generated(output)
            case PrefillReport(key):
                self._prefilled(key, message)
            case TransferReport(key) if message.kind is TransferKind.HANDOVER:
                part = self._parts.get(key)
                if part is not None and part.span is None:
                    part.span = self._begin(DECODE, key, part)
            case PartEnded(key, reason, text):
                self._end(key, reason, text or reason)

    # --- inside

    def _transfer_context(self, key: RequestKey) -> Context | None:
        part = self._parts.get(key)
        return None if part is None else context_of(part.transfer_parent)

    def _begin(self, name: str, key: RequestKey, part: _Part) -> Span:
        span = self._tracer.start_span(
            f"{name} {self._model_name}".rstrip(),
            context_of(part.parent),
            start_time=part.clock.now_ns(),
        )
        span.set_attributes(
            {
                "gen_ai.request.model": self._model_name,
                "disagg.request_id": key.request_id,
                "disagg.generation": key.generation,
            }
        )
        return span

    def _prefilled(self, key: RequestKey, report: PrefillReport) -> None:
        """The prefill is over: here the decode begins, or the part is done."""
        part = self._parts.get(key)
        if part is None or part.span is None:
            return
        part.span.set_attributes(
            {
                "gen_ai.usage.input_tokens": report.num_prompt_tokens,
                "disagg.hit_tokens": report.hit_tokens,
                "disagg.pulled_tokens": report.pulled_tokens,
                "disagg.computed_tokens": report.computed_tokens,
            }
        )
        if report.times is not None:
            part.span.set_attribute("disagg.queue_ms", report.times.queue_ms)
            part.span.set_attribute("disagg.transfer_ms", report.times.transfer_ms)
            part.span.set_attribute("disagg.compute_ms", report.times.compute_ms)
        part.span.end(part.clock.now_ns())
        part.span = None
        if part.role is Role.PREFILL:
            del self._parts[key]
        else:
            part.span = self._begin(DECODE, key, part)

    def _generated(self, output: SequenceOutput) -> None:
        part = self._parts.get(output.key)
        if part is None:
            return
        part.num_tokens += len(output.token_ids)
        if output.finish_reason:
            if part.span is not None:
                finish = [output.finish_reason.value]
                part.span.set_attribute("gen_ai.response.finish_reasons", finish)
            self._end(output.key, "", "")

    def _end(self, key: RequestKey, outcome: str, message: str) -> None:
        part = self._parts.pop(key, None)
        if part is None or part.span is None:
            return
        part.span.set_attribute("gen_ai.usage.output_tokens", part.num_tokens)
        if outcome:
            part.span.set_attribute("disagg.outcome", outcome)
            if outcome != "cancelled":  # the router says so also of what is over elsewhere
                part.span.set_status(StatusCode.ERROR, message)
        part.span.end(part.clock.now_ns())
