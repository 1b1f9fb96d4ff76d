"""The revisions that are served side by side, and how new requests are shared among them."""

from http import HTTPStatus
from typing import Any

from disagg.router.callers import ADMIN
from disagg.router.dispatch import Dispatcher
from disagg.router.http_exchange import Exchange
from disagg.router.http_site import Page
from disagg.router.openapi import operations
from disagg.router.options import RouterOptions
from disagg.router.request_bodies import RequestBodies
from disagg.router.revision_weights import parse_revision_weights_body
from disagg.router.status_pages import OBSERVERS
from disagg.routing.revisions import RevisionView

PATH = "/v1/disagg/revisions"


class RevisionPages:
    """``/v1/disagg/revisions`` on the admin port.

    Attributes:
        pages: for a site.
    """

    def __init__(self, options: RouterOptions, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._bodies = RequestBodies(options)
        self.pages = {
            ("GET", PATH): Page(self._show, operations.REVISIONS, OBSERVERS),
            ("PUT", PATH): Page(self._set, operations.SET_REVISIONS, frozenset((ADMIN,))),
        }

    async def _show(self, exchange: Exchange) -> None:
        await exchange.json(self._body())

    async def _set(self, exchange: Exchange) -> None:
        """PUT ``{"weights": {NAME: WEIGHT}}``: in place of all weights there were."""
        weights = await self._bodies.read(exchange, parse_revision_weights_body)
        self._dispatcher.set_revision_weights(weights)
        await exchange.json(self._body(), HTTPStatus.OK)

    def _body(self) -> dict[str, Any]:
        core = self._dispatcher.core
        return {
            "weights": dict(core.revision_weights),
            "revisions": [revision_body(view) for view in core.revision_views()],
        }


def revision_body(view: RevisionView) -> dict[str, Any]:
    """A revision for ``/v1/disagg/revisions``."""
    contract = view.contract
    return {
        "name": view.name,
        "weight": view.weight,
        "num_workers": view.num_workers,
        "num_workers_ready": view.num_ready,
        "num_requests": view.num_requests,
        "num_running": view.num_running,
        "num_waiting": view.num_waiting,
        "max_model_tokens": view.max_model_tokens or None,
        "model_fingerprint": contract.model_fingerprint if contract else None,
        "dtype": contract.dtype if contract else None,
        "hash_block_tokens": contract.hash_block_tokens if contract else None,
    }
