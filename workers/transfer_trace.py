"""One trace span and one log line per transfer into this worker.

It watches what passes through the control and changes nothing; so it sees a transfer from its
first READ (or from its report, where nothing had to be read) to its commit or its end.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.util.types import AttributeValue

from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import Offers
from disagg.messages.reports import TransferReport
from disagg.messages.session import PartEnded, ToRouterMessage
from disagg.telemetry.span_clock import SpanClock
from disagg.transfer.actions import PostRead

log = logging.getLogger(__name__)

SPAN_NAME = "kv.transfer"
AT_REQUEST = ("committed", "released", "cancelled")
"""Ends that somebody wanted: it was done, its reservation was given back as the request was over
with its first tokens, or the router took it back and knows why. No warning: they are no rarer than
clients that leave and stop strings."""


@dataclass(slots=True)
class _Open:
    owner: Incarnation
    clock: SpanClock = field(default_factory=SpanClock)
    num_reads: int = 0
    num_blocks_posted: int = 0
    lease_id: int = 0
    num_ranges: tuple[int, ...] = ()
    attributes: dict[str, AttributeValue] = field(default_factory=dict)


class TransferTrace:
    """Transfers in progress, until they end; at most one per generation of a request.

    Args:
        tracer: makes the spans.
        context_of: the context of a generation's span that its transfers belong to.
    """

    def __init__(
        self,
        tracer: trace.Tracer,
        context_of: Callable[[RequestKey], Context | None] = lambda _: None,
    ) -> None:
        self._tracer = tracer
        self._context_of = context_of
        self._open: dict[RequestKey, _Open] = {}

    @property
    def num_open(self) -> int:
        """Spans that were begun and not ended."""
        return len(self._open)

    def posted(self, read: PostRead) -> None:
        """A READ of a transfer is posted, the first of it perhaps."""
        one = self._open.get(read.key)
        if one is None:
            one = self._open[read.key] = _Open(read.owner)
        one.num_reads += 1
        one.num_blocks_posted += len(read.dst_blocks)

    def offered(self, sender: Incarnation, offers: Offers) -> None:
        """Note offers of an owner; to be called after the READs they led to."""
        one = self._open.get(offers.key)
        if one is None or one.owner != sender or offers.dead:
            return
        one.lease_id = offers.lease_id
        if offers.seal is not None:
            one.num_ranges = offers.seal.num_ranges

    def reported(self, message: ToRouterMessage) -> None:
        """Note that the router is informed of a transfer's end, or of its generation's end."""
        if isinstance(message, TransferReport):
            one = self._open.pop(message.key, None) or _Open(message.owner)
            one.attributes = _of_report(message)
            self._end(message.key, one, "failed" if message.failed else "committed", message.failed)
        elif isinstance(message, PartEnded):
            self.ended(message.key, message.reason, message.message)

    def ended(self, key: RequestKey, outcome: str, message: str = "") -> None:
        """A generation ended here; nothing if no transfer of it is in progress."""
        one = self._open.pop(key, None)
        if one is not None:
            self._end(key, one, outcome, message)

    def forget_router(self, router: str, outcome: str) -> None:
        """Forget a router's generations: all have ended here."""
        for key in [key for key in self._open if key.router == router]:
            self.ended(key, outcome)

    def _end(self, key: RequestKey, one: _Open, outcome: str, message: str) -> None:
        text = "transfer of %s/%d from %s: %s, %d reads%s"
        level = logging.DEBUG if outcome in AT_REQUEST else logging.WARNING
        why = f" ({message})" if message else ""
        log.log(
            level,
            text,
            key.request_id,
            key.generation,
            one.owner.worker_id,
            outcome,
            one.num_reads,
            why,
            extra={"request_id": key.request_id, "generation": key.generation},
        )
        context = self._context_of(key)
        span = self._tracer.start_span(SPAN_NAME, context, start_time=one.clock.began_ns)
        if span.is_recording():
            span.set_attributes(
                {
                    "disagg.request_id": key.request_id,
                    "disagg.generation": key.generation,
                    "disagg.owner": one.owner.worker_id,
                    "disagg.owner_epoch": one.owner.epoch,
                    "disagg.lease_id": one.lease_id,
                    "disagg.num_reads": one.num_reads,
                    "disagg.num_blocks_posted": one.num_blocks_posted,
                    "disagg.group_num_ranges": one.num_ranges,
                    "disagg.outcome": outcome,
                    **one.attributes,
                }
            )
            if outcome not in ("committed", "released"):
                span.set_status(trace.StatusCode.ERROR, message or outcome)
        span.end(one.clock.now_ns())


def _of_report(report: TransferReport) -> dict[str, AttributeValue]:
    groups = report.groups

    def column(name: str) -> Sequence[int]:
        return [getattr(group, name) for group in groups]

    return {
        "disagg.kind": report.kind.value,
        "disagg.read_ms": report.read_ms,
        "disagg.exposed_ms": report.exposed_ms,
        "disagg.num_bytes": sum(column("pulled_bytes")),
        "disagg.group_kinds": [group.kind for group in groups],
        "disagg.group_num_blocks": column("pulled_blocks"),
        "disagg.group_num_bytes": column("pulled_bytes"),
        "disagg.group_full_bytes": column("full_bytes"),
    }
