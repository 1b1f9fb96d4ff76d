"""What changes the state of workers and is no request; see `router.admin_endpoints`."""

from http import HTTPStatus
from typing import Any, ClassVar

from disagg.errors import RemoteFault, RequestError
from disagg.router.dispatch import Dispatcher
from disagg.router.http_exchange import Exchange
from disagg.router.openai.errors import error_body
from disagg.routing.actions import CacheResetEnded


class ForbiddenError(RequestError):
    """The operator has not opened this path."""

    http_status: ClassVar[int] = 403
    code: ClassVar[str] = "forbidden"


class AdminPages:
    """Paths for operators; they ask nobody who he is.

    Args:
        dispatcher: what they act on.
        enabled: they do anything at all.
    """

    def __init__(self, dispatcher: Dispatcher, enabled: bool) -> None:
        self._dispatcher = dispatcher
        self._enabled = enabled

    async def reset_prefix_cache(self, exchange: Exchange) -> None:
        """POST /reset_prefix_cache, as in vLLM: every worker forgets what it has cached.

        200 if all did; else 503, and what each worker made of it.
        """
        if not self._enabled:
            raise ForbiddenError(f"{exchange.path} needs the setting router.admin_endpoints")
        if exchange.query:
            raise RequestError("no parameters are known here", param="query")
        ended = await self._dispatcher.reset_prefix_caches()
        status = HTTPStatus.OK if ended.complete else HTTPStatus.SERVICE_UNAVAILABLE
        await exchange.json(reset_body(ended), status)


def reset_body(ended: CacheResetEnded) -> dict[str, Any]:
    """The answer to a reset, per worker."""
    failed = [one for one in ended.workers if one.error]
    body: dict[str, Any] = {
        "success": ended.complete,
        "num_forgotten": sum(one.num_forgotten for one in ended.workers),
        "workers": [
            {
                "worker": one.worker._asdict(),
                "num_forgotten": one.num_forgotten,
                "in_use": dict(one.in_use),
                "error": one.error or None,
            }
            for one in ended.workers
        ],
    }
    if failed:
        told = "; ".join(f"{one.worker.worker_id} {one.error}" for one in failed)
        body |= error_body(RemoteFault(f"not every prefix cache was reset: {told}"))
    return body
