"""The API keys of gRPC calls, looked at before anything of a call is read but its head."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from disagg.errors import DisaggError
from disagg.router.grpc_service import GENERATE, abort, caller_of
from disagg.router.keys import KeyRing
from disagg.router.metrics import Metrics
from disagg.tls.callers import CLIENT_METHODS
from disagg.tls.handlers import Context, Interceptor


class KeyCheck(Interceptor):
    """Refuses clients' calls without a key that may make them.

    A method with one request gets it whole, megabytes of it, before it could look at the key; one
    with a stream of requests reads none that it does not ask for.
    """

    def __init__(self, keys: KeyRing, metrics: Metrics) -> None:
        self._keys = keys
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's handler, or one that refuses; None for an unknown method."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method not in CLIENT_METHODS:
            return handler
        try:
            caller_of(handler_call_details.invocation_metadata, self._keys)
        except DisaggError as error:
            if handler_call_details.method == GENERATE:
                self._metrics.ended(error.code, "")
            return _refusal(error)
        return handler


def _refusal(error: DisaggError) -> Any:
    async def refuse(requests: Any, context: Context) -> None:
        await aiter(requests).aclose()  # else Python warns that nobody has begun it
        await abort(context, error)

    return grpc.stream_unary_rpc_method_handler(refuse)
