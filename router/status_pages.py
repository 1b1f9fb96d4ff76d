"""Whether the router lives and can serve, for whoever may ask; on both of its HTTP ports."""

from http import HTTPStatus
from typing import Any

from disagg.router.callers import ADMIN, OBSERVE, Caller
from disagg.router.dispatch import Dispatcher
from disagg.router.http_exchange import Exchange
from disagg.router.http_site import Page
from disagg.router.openapi import operations
from disagg.router.options import RouterOptions

NO_KEY: frozenset[str] = frozenset()
OBSERVERS = frozenset((OBSERVE, ADMIN))


class StatusPages:
    """``/health`` and ``/ready``: probes need no key and learn no more than their answer.

    Attributes:
        pages: for a site.
    """

    def __init__(self, options: RouterOptions, dispatcher: Dispatcher) -> None:
        self._model_name = options.model_name
        self._dispatcher = dispatcher
        self.pages = {
            ("GET", "/health"): Page(self._health, operations.HEALTH, NO_KEY),
            ("GET", "/ready"): Page(self._ready, operations.READY, NO_KEY),
        }

    async def _health(self, exchange: Exchange) -> None:
        await exchange.json(self._summary(exchange.caller))

    async def _ready(self, exchange: Exchange) -> None:
        status = HTTPStatus.OK if self._dispatcher.ready else HTTPStatus.SERVICE_UNAVAILABLE
        await exchange.json(self._summary(exchange.caller), status)

    def _summary(self, caller: Caller) -> dict[str, Any]:
        summary: dict[str, Any] = {
            "status": "stopping" if self._dispatcher.draining else "ok",
            "ready": self._dispatcher.ready,
        }
        if caller.scopes & OBSERVERS:
            fleet = self._dispatcher.core.fleet
            summary |= {
                "router": self._dispatcher.router_id,
                "missing": self._dispatcher.roles.missing,
                "model": self._model_name,
                "revisions": [one.name for one in self._dispatcher.core.serving],
                "num_workers": len(fleet),
                "num_workers_ready": sum(view.ready for view in fleet),
                "num_requests": self._dispatcher.core.num_live,
                "num_waiting": self._dispatcher.core.num_waiting,
            }
        return summary
