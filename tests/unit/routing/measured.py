"""Workers' measurements for tests: steps of known cost."""

from dataclasses import replace

from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.reports import GroupTransfer, TransferKind, TransferReport
from disagg.messages.stats import WorkerStats
from disagg.messages.step_times import StepShape, StepTimes
from disagg.scheduling.step_meter import WARM_UP_STEPS, StepMeter
from tests.unit.routing.builders import STATS

STEP_MS, TOKEN_MS, DECODE_MS = 2.0, 0.1, 0.5
PREFILLS = tuple(StepShape(64 * n, 0.0, 0, 0.0) for n in (1, 2, 3, 4))
DECODES = tuple(StepShape(0, 0.0, n, n / 4) for n in (1, 2, 3, 4, 6, 8))
"""Each with 256 tokens before it."""


def step_times(shapes: tuple[StepShape, ...], slower: float = 1.0) -> StepTimes:
    """Many of these steps, measured."""
    meter = StepMeter(256)
    for _ in range(WARM_UP_STEPS):
        meter.add(shapes[0], 1e6)
    for shape in shapes * 12:
        took_ms = STEP_MS + TOKEN_MS * shape.num_prefill_tokens + DECODE_MS * shape.num_decodes
        meter.add(shape, slower * took_ms)
    return meter.times


ALL_STEPS = step_times(PREFILLS + DECODES)


def stats(times: StepTimes | None = ALL_STEPS, **changes: int) -> WorkerStats:
    """Of a worker that has measured its steps."""
    return replace(STATS, step_times=times, **changes)  # type: ignore[arg-type]


def transfer(
    key: RequestKey,
    owner: Incarnation,
    num_bytes: int,
    read_ms: int,
    kind: TransferKind = TransferKind.HANDOVER,
    **changes: object,
) -> TransferReport:
    """A report of a transfer whose READs all came after its prefill."""
    group = GroupTransfer(0, "full_attention", 0, 4, "", 1, num_bytes, 0, 1, num_bytes)
    report = TransferReport(key, owner, (group,), 1, read_ms, read_ms + 4, kind)
    return replace(report, **changes)  # type: ignore[arg-type]
