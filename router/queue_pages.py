"""How long requests wait, and for workers of which role: what the automatic mode looks at."""

from collections.abc import Iterator
from typing import Any

from disagg.router.dispatch import Dispatcher
from disagg.router.http_exchange import Exchange
from disagg.router.http_site import Page
from disagg.router.openapi import operations
from disagg.router.status_pages import OBSERVERS
from disagg.routing.record import RequestRecord

PATH = "/v1/disagg/queues"
LATELY_MS = 10_000
"""Who had its first token longer ago says nothing of the queues any more."""


class QueuePages:
    """``/v1/disagg/queues`` on the admin port.

    Attributes:
        pages: for a site.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.pages = {("GET", PATH): Page(self._show, operations.QUEUES, OBSERVERS)}

    async def _show(self, exchange: Exchange) -> None:
        core, now_ms = self._dispatcher.core, self._dispatcher.now_ms()
        found = map(core.record, dict.fromkeys(self._dispatcher.recent_ids))
        records = [one for one in found if one is not None]
        await exchange.json({"waits": list(waits(records, core.full_roles, now_ms))})


def waits(
    records: list[RequestRecord], full_roles: frozenset[str], now_ms: int
) -> Iterator[dict[str, Any]]:
    """What requests wait, or waited until lately.

    Those that wait at the router wait for every role that has no room; a worker that prefills says
    how long a request waited there, when it had its first token.
    """
    for record in records:
        age_ms = now_ms - record.received_ms
        if not record.generations:
            if record.finished_ms is None:
                waited_ms = now_ms - record.submitted_ms
                for role in sorted(full_roles):
                    yield {"role": role, "age_ms": age_ms, "waited_ms": waited_ms}
        elif record.first_token_ms is not None and now_ms - record.first_token_ms <= LATELY_MS:
            last = record.generations[-1]
            if last.prefill_times is not None:
                waited_ms = last.prefill_times.queue_ms
                yield {"role": last.prefill_role, "age_ms": age_ms, "waited_ms": waited_ms}
