"""Requests whose planning fails by a bug, of ours or of a policy."""

import logging
import time
from collections.abc import Callable

from disagg.router.metrics import Metrics

logger = logging.getLogger(__name__)

PLAN_BUGS_MAX = 50
APART_S = 1.0
"""What fails within this time counts once: one body may have hundreds of prompts or choices."""


class PlanBugs:
    """Logs and counts them, and says when no plan succeeds any more.

    One request that cannot be planned ends with an error and concerns nobody else. If none can, the
    router knows something wrong, and whoever runs it starts another.

    Args:
        metrics: count them.
        on_broken: called after `PLAN_BUGS_MAX` of them, `APART_S` apart, with no plan in between.
    """

    def __init__(self, metrics: Metrics, on_broken: Callable[[], None]) -> None:
        self._metrics = metrics
        self._on_broken = on_broken
        self._num_in_row = 0
        self._next_s = 0.0

    def failed(self, request_id: str, error: Exception) -> None:
        """Planning a request raised what nobody raises on purpose."""
        self._metrics.task_failed("plan")
        now_s = time.monotonic()
        if now_s < self._next_s:
            logger.error("planning request %s failed too: %s", request_id, type(error).__name__)
            return
        self._next_s = now_s + APART_S
        self._num_in_row += 1
        logger.error("planning request %s failed", request_id, exc_info=error)
        if self._num_in_row == PLAN_BUGS_MAX:
            logger.error("no plan succeeds any more: the router ends")
            self._on_broken()

    def planned(self) -> None:
        """Some request goes to its workers."""
        self._num_in_row = 0
