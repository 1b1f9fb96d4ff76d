"""Bytes that are no message of the method's kind: the caller's fault, and told to it as such."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from disagg.errors import ProtocolError
from disagg.tls.handlers import Context, Interceptor, Read, looked_at


@dataclass(frozen=True, slots=True)
class _NoMessage:
    """In a request's place."""

    why: str


class MalformedRequests(Interceptor):
    """Ends calls whose requests cannot be read with INVALID_ARGUMENT.

    gRPC would end them with UNKNOWN, as if a bug of ours, and log an exception at each.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's handler, to which only messages come; None for an unknown method."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        look = _each if handler.request_streaming else _one
        return looked_at(handler, look, _reading(handler.request_deserializer))


def _reading(deserialize: Read | None) -> Read | None:
    if deserialize is None:
        return None  # the handler takes bytes

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return _NoMessage(str(error))

    return read


def _message(request: Any) -> Any:
    if isinstance(request, _NoMessage):
        raise ProtocolError(request.why)
    return request


async def _one(request: Any, context: Context) -> Any:
    return _message(request)


async def _each(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
    return (_message(request) async for request in requests)
