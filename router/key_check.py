"""The API keys of gRPC calls, looked at before anything is read but a head; then how it is read."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from disagg.errors import DisaggError, RequestError
from disagg.router.call_reads import CallReads
from disagg.router.callers import Caller
from disagg.router.grpc_service import GENERATE, abort, address_of, caller_of
from disagg.router.keys import KeyRing
from disagg.router.metrics import Metrics
from disagg.tls.callers import CLIENT_METHODS
from disagg.tls.handlers import Context, Interceptor


class KeyCheck(Interceptor):
    """Refuses clients' calls without a key that may make them.

    A method with one request gets it whole, megabytes of it, before it could look at the key; one
    with a stream of requests reads none that it does not ask for. So requests of those who have a
    key are asked for as well, a few at a time.

    Args:
        keys: that open the router.
        metrics: of what is refused.
        calls_max: of one tenant, or of one network without keys, whose request has not come whole.
    """

    def __init__(self, keys: KeyRing, metrics: Metrics, calls_max: int) -> None:
        self._keys = keys
        self._metrics = metrics
        self._reads = CallReads(calls_max)

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
            caller = caller_of(handler_call_details.invocation_metadata, self._keys)
        except DisaggError as error:
            if handler_call_details.method == GENERATE:
                self._metrics.ended(error.code, "")
            return _refusal(error)
        return self._read_in_turn(handler, caller, handler_call_details.method)

    def _read_in_turn(self, handler: Any, caller: Caller, method: str) -> Any:
        """The handler of a method with one request, which is read when it is its turn."""

        async def read(requests: AsyncIterator[Any], context: Context) -> Any:
            try:
                async with self._reads.turn(caller.at(address_of(context.peer()))):
                    async for request in requests:
                        return request
                raise RequestError("there is no request in the call")
            except DisaggError as error:
                if method == GENERATE:
                    self._metrics.ended(error.code, caller.tenant)
                await aiter(requests).aclose()  # type: ignore[attr-defined]  # see `_refusal`
                await abort(context, error)

        codecs = handler.request_deserializer, handler.response_serializer
        if handler.response_streaming:

            async def answer_many(requests: AsyncIterator[Any], context: Context) -> None:
                await handler.unary_stream(await read(requests, context), context)

            return grpc.stream_stream_rpc_method_handler(answer_many, *codecs)

        async def answer_once(requests: AsyncIterator[Any], context: Context) -> Any:
            return await handler.unary_unary(await read(requests, context), context)

        return grpc.stream_unary_rpc_method_handler(answer_once, *codecs)


def _refusal(error: DisaggError) -> Any:
    async def refuse(requests: Any, context: Context) -> None:
        await aiter(requests).aclose()  # else Python warns that nobody has begun it
        await abort(context, error)

    return grpc.stream_unary_rpc_method_handler(refuse)
