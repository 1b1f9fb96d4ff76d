"""The clock of the router's core."""

import asyncio
import logging
from collections.abc import Callable

from disagg.router.metrics import Metrics
from disagg.routing.pulse import TICK_MS_MAX

logger = logging.getLogger(__name__)

TICK_S = 0.1
STOOD_STILL_S = TICK_MS_MAX / 1000
"""A tick so late is that of a router that was stopped (SIGSTOP, a suspended machine)."""
TICK_FAILURES_MAX = 50


async def tick_forever(
    tick: Callable[[], None], metrics: Metrics, on_broken: Callable[[], None]
) -> None:
    """Tick the core for ever.

    One failure need not concern the other workers and requests, so the next tick is tried. A
    router whose ticks keep failing notices no lost worker and no late request: it ends, and
    whoever runs it starts another.

    After the router stood still it first hears what has come meanwhile: all its requests had made
    no progress for longer than they may, by its own clock, and failed at once.

    Args:
        tick: advances the core.
        metrics: count failures, and show how late each tick comes.
        on_broken: called after `TICK_FAILURES_MAX` failures in a row, at the end.
    """
    loop = asyncio.get_running_loop()
    num_failures = 0
    while num_failures < TICK_FAILURES_MAX:
        due_s = loop.time() + TICK_S
        await asyncio.sleep(TICK_S)
        late_s = loop.time() - due_s
        metrics.lagged(late_s)
        if late_s > STOOD_STILL_S:
            await asyncio.sleep(TICK_S)
        try:
            tick()
            num_failures = 0
        except Exception:
            num_failures += 1
            logger.exception("tick failed, %d in a row", num_failures)
            metrics.task_failed("tick")
    logger.error("no tick succeeds any more: the router ends")
    on_broken()
