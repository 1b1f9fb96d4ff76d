"""Operators want a worker, or a host, to be free of work."""

import logging

from disagg.messages.session import Drain
from disagg.router.callers import ADMIN
from disagg.router.dispatch import Dispatcher
from disagg.router.drain_body import parse_drain_body
from disagg.router.http_exchange import Exchange
from disagg.router.http_site import Page
from disagg.router.openapi import operations
from disagg.router.options import RouterOptions
from disagg.router.request_bodies import RequestBodies
from disagg.routing.drains import drain_orders

logger = logging.getLogger(__name__)

PATH = "/v1/disagg/drain"


class DrainPages:
    """``/v1/disagg/drain`` on the admin port; how far a drain is, ``/v1/disagg/workers`` says.

    Attributes:
        pages: for a site.
    """

    def __init__(self, options: RouterOptions, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._bodies = RequestBodies(options)
        drain = Page(self._drain, operations.DRAIN, frozenset((ADMIN,)))
        self.pages = {("PUT", PATH): drain}

    async def _drain(self, exchange: Exchange) -> None:
        """PUT ``{"name": WORKER or HOST, "timeout_ms": 30000, "undo": false}``."""
        given = await self._bodies.read(exchange, parse_drain_body)
        fleet = self._dispatcher.core.fleet
        orders = drain_orders(fleet, given.name, given.timeout_ms, undo=given.undo)
        told = {order.worker: order.message for order in orders}
        for session in self._dispatcher.sessions:
            if (message := told.get(session.info.incarnation)) is not None:
                session.send(message)
        order = orders[0].message  # the same for all
        logger.info("an operator names %s: %s", given.name, order)
        ends = isinstance(order, Drain) and order.ends
        await exchange.json({"workers": [worker._asdict() for worker in told], "ends": ends})
