"""The KV events of a worker as one router follows them."""

import asyncio
from collections.abc import AsyncIterator, Callable

from disagg.kv.event_log import WAITING_EVENTS_MAX, KVEventLog
from disagg.messages.kv_events import KVEventBatch, KVSnapshot

LOOK_S = 0.02


async def follow(
    events: KVEventLog,
    sequence: int,
    changed: Callable[[], asyncio.Event],
    pace_ms: Callable[[], int],
) -> AsyncIterator[KVEventBatch | KVSnapshot]:
    """Events from a number on, for ever; a snapshot where the log does not reach back so far.

    Each step of an engine has some, and to carry them costs a router more than to take them in. So
    what comes shortly after a batch waits for the next one.

    Args:
        events: of the worker.
        sequence: number of the first one wanted.
        changed: gives what is set at the next event.
        pace_ms: so long after a batch comes the next one at the earliest.
    """
    while True:
        waits_for = changed()
        batch = events.since(sequence)
        if batch is None:
            snapshot = events.snapshot()
            sequence = snapshot.next_seq
            for part in snapshot.parts():
                yield part
        elif batch.events:
            sequence = batch.next_seq
            for some in batch.parts():
                yield some
            await _pause(events, sequence, pace_ms() / 1000)
        if events.next_seq == sequence:
            await waits_for.wait()


async def _pause(events: KVEventLog, sequence: int, pause_s: float) -> None:
    while pause_s > 0 and events.next_seq - sequence < WAITING_EVENTS_MAX:
        await asyncio.sleep(min(LOOK_S, pause_s))
        pause_s -= LOOK_S
