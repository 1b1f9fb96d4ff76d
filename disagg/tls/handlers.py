"""A method's handler behind something that looks at the call first."""

from collections.abc import AsyncIterator, Awaitable, Callable
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc

from disagg.errors import ProtocolError

if TYPE_CHECKING:
    Interceptor: TypeAlias = grpc.aio.ServerInterceptor[Any, Any]
    Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
else:
    Interceptor, Context = grpc.aio.ServerInterceptor, Any  # not subscriptable at run time

Look = Callable[[Any, Context], Awaitable[Any]]
"""Takes a call's request, or the iterator of them, and its context; returns what the handler gets
in the request's place, or aborts the call."""
Read = Callable[[bytes], Any]


def looked_at(handler: Any, look: Look, read: Read | None = None) -> Any:
    """The same handler behind ``look``; with or without streams on either side.

    A `ProtocolError` of either ends the call with INVALID_ARGUMENT: the caller sent it.

    Args:
        handler: as gRPC has it.
        look: runs first.
        read: makes requests of bytes in place of the handler's own.
    """
    codecs = read or handler.request_deserializer, handler.response_serializer
    if handler.response_streaming:
        streaming = handler.stream_stream or handler.unary_stream

        async def yield_many(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                request = await look(request, context)
                async for response in streaming(request, context):
                    yield response
                return
            except (ProtocolError, grpc.aio.AbortError) as error:
                ended = await _ended(error, context)
            del request, context  # see `_ended`
            raise ended

        async def write_many(request: Any, context: Context) -> None:
            try:
                await streaming(await look(request, context), context)
                return
            except (ProtocolError, grpc.aio.AbortError) as error:
                ended = await _ended(error, context)
            del request, context  # see `_ended`
            raise ended

        answer_many = write_many if iscoroutinefunction(streaming) else yield_many
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(answer_many, *codecs)
        return grpc.unary_stream_rpc_method_handler(answer_many, *codecs)
    single = handler.stream_unary or handler.unary_unary

    async def answer_once(request: Any, context: Context) -> Any:
        try:
            return await single(await look(request, context), context)
        except (ProtocolError, grpc.aio.AbortError) as error:
            ended = await _ended(error, context)
        del request, context  # see `_ended`
        raise ended

    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(answer_once, *codecs)
    return grpc.unary_unary_rpc_method_handler(answer_once, *codecs)


async def _ended(
    error: ProtocolError | grpc.aio.AbortError, context: Context
) -> grpc.aio.AbortError:
    """The end of a call without what it came through, to be raised once nothing is handled.

    gRPC keeps it at the call, which the frames on its way refer to: so the request, megabytes of
    it, would be freed by the garbage collector alone.
    """
    if isinstance(error, ProtocolError):
        try:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        except grpc.aio.AbortError as aborted:
            error = aborted
    error.__context__ = None
    return error.with_traceback(None)
