"""One span per transfer, whatever its end."""

import logging
from collections.abc import Callable

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import OfferedRange, Offers, Seal
from disagg.messages.reports import GroupTransfer, TransferKind, TransferReport
from disagg.messages.session import EndReason, PartEnded
from disagg.transfer.actions import PostRead
from disagg.workers.transfer_trace import TransferTrace

OWNER = Incarnation("p0", "epoch")
KEY = RequestKey("request", 3)


class Traced:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.trace = TransferTrace(provider.get_tracer("test"))

    def one_span(self) -> ReadableSpan:
        (span,) = self.exporter.get_finished_spans()
        assert self.trace.num_open == 0
        return span


@pytest.fixture
def traced() -> Traced:
    return Traced()


def read(read_id: int, *blocks: int) -> PostRead:
    return PostRead(read_id, KEY, OWNER, blocks, blocks)


def report(kind: TransferKind = TransferKind.HANDOVER, failed: str = "") -> TransferReport:
    group = GroupTransfer(0, "sliding_window", 16, 8, "..pp", 2, 512, 500, 4, 1024)
    return TransferReport(KEY, OWNER, (group,), 2, 7, 3, kind, 32, failed=failed)


def test_a_committed_transfer_is_one_span_with_what_it_moved(traced: Traced) -> None:
    traced.trace.posted(read(1, 4))
    traced.trace.offered(OWNER, Offers(KEY, 9, 0, (OfferedRange(0, 2, 4, 1),)))
    traced.trace.posted(read(2, 5))
    traced.trace.offered(OWNER, Offers(KEY, 9, 1, (OfferedRange(0, 3, 5, 1),), Seal(32, (2,))))
    traced.trace.reported(report())
    span = traced.one_span()
    assert span.attributes is not None
    assert dict(span.attributes) == {
        "disagg.request_id": "request",
        "disagg.generation": 3,
        "disagg.owner": "p0",
        "disagg.owner_epoch": "epoch",
        "disagg.lease_id": 9,
        "disagg.num_reads": 2,
        "disagg.num_blocks_posted": 2,
        "disagg.group_num_ranges": (2,),
        "disagg.outcome": "committed",
        "disagg.kind": "handover",
        "disagg.read_ms": 7,
        "disagg.exposed_ms": 3,
        "disagg.num_bytes": 512,
        "disagg.group_kinds": ("sliding_window",),
        "disagg.group_num_blocks": (2,),
        "disagg.group_num_bytes": (512,),
        "disagg.group_full_bytes": (1024,),
    }
    assert span.status.status_code is StatusCode.UNSET
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.start_time <= span.end_time


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (lambda t: t.reported(PartEnded(KEY, EndReason.READ_FAILED, "no route")), "read_failed"),
        (lambda t: t.reported(report(TransferKind.PREFIX, "none: gone")), "failed"),
        (lambda t: t.ended(KEY, "cancelled", "client left"), "cancelled"),
        (lambda t: t.forget_router("", "router_lost"), "router_lost"),
    ],
)
def test_every_other_end_is_an_error_with_its_cause(
    traced: Traced, end: Callable[[TransferTrace], None], outcome: str
) -> None:
    traced.trace.posted(read(1, 4))
    end(traced.trace)
    span = traced.one_span()
    assert span.attributes is not None
    assert span.attributes["disagg.outcome"] == outcome
    assert span.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize(
    ("end", "level"),
    [
        (lambda t: t.reported(report()), logging.DEBUG),
        (lambda t: t.ended(KEY, "cancelled", "stop string"), logging.DEBUG),
        (lambda t: t.ended(KEY, "released"), logging.DEBUG),
        (lambda t: t.reported(PartEnded(KEY, EndReason.LEASE_DEAD)), logging.WARNING),
        (lambda t: t.forget_router("", "router_lost"), logging.WARNING),
    ],
)
def test_only_what_nobody_wanted_is_a_warning(
    traced: Traced,
    caplog: pytest.LogCaptureFixture,
    end: Callable[[TransferTrace], None],
    level: int,
) -> None:
    traced.trace.posted(read(1, 4))
    with caplog.at_level(logging.DEBUG):
        end(traced.trace)
    assert [record.levelno for record in caplog.records] == [level]


def test_a_request_that_is_over_at_its_first_token_is_no_error(traced: Traced) -> None:
    """What was read for it by then is given back."""
    traced.trace.posted(read(1, 4))
    traced.trace.ended(KEY, "released")
    assert traced.one_span().status.status_code is StatusCode.UNSET


def test_what_is_no_transfer_of_ours_leaves_no_span(traced: Traced) -> None:
    traced.trace.reported(PartEnded(KEY, EndReason.CANCELLED))
    traced.trace.ended(KEY, "cancelled")
    traced.trace.offered(OWNER, Offers(KEY, 9, 0))
    assert traced.exporter.get_finished_spans() == ()
    traced.trace.posted(read(1, 4))
    traced.trace.offered(Incarnation("p0", "another life"), Offers(KEY, 8, 0, seal=Seal(1, (1,))))
    traced.trace.reported(report())
    attributes = traced.one_span().attributes
    assert attributes is not None
    assert attributes["disagg.lease_id"] == 0


def test_a_transfer_without_reads_is_a_span_too(traced: Traced) -> None:
    traced.trace.reported(report())
    attributes = traced.one_span().attributes
    assert attributes is not None
    assert attributes["disagg.num_reads"] == 0
