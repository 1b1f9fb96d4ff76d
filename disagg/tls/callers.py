"""Who may call what: nodes everything, clients what is meant for them."""

from collections.abc import AsyncIterator, Awaitable, Callable
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc

from disagg.tls.certificate_files import CLIENT_NAME, NODE_NAME

CLIENT_METHODS = frozenset({"/disagg.wire.v1.Router/Generate", "/disagg.wire.v1.Router/Match"})
"""All others are between nodes; a method that is new is closed to clients."""
NAMES_PROPERTY = "x509_subject_alternative_name"
"""Where gRPC puts the names of the certificate that the caller has proven."""

if TYPE_CHECKING:
    Interceptor: TypeAlias = grpc.aio.ServerInterceptor[Any, Any]
    Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
else:
    Interceptor, Context = grpc.aio.ServerInterceptor, Any  # not subscriptable at run time


class CallerCheck(Interceptor):
    """Refuses callers whose certificate, although of the cluster's authority, is for others."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's handler behind a check of its caller; None for an unknown method."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        is_for_clients = handler_call_details.method in CLIENT_METHODS
        names = {NODE_NAME, CLIENT_NAME} if is_for_clients else {NODE_NAME}
        return _checked(handler, names)


async def _check(context: Context, names: set[str]) -> None:
    given = [
        name.decode(errors="replace") for name in context.auth_context().get(NAMES_PROPERTY, ())
    ]
    if names.isdisjoint(given):
        await context.abort(
            grpc.StatusCode.PERMISSION_DENIED,
            f"needs a certificate for {' or '.join(sorted(names))}, "
            f"this one is for {', '.join(given) or 'nobody'}",
        )


def _checked(handler: Any, names: set[str]) -> Any:
    """The same handler behind the check; with or without streams on either side."""
    codecs = handler.request_deserializer, handler.response_serializer
    if handler.response_streaming:
        streaming = handler.stream_stream or handler.unary_stream

        async def yield_many(request: Any, context: Context) -> AsyncIterator[Any]:
            await _check(context, names)
            async for response in streaming(request, context):
                yield response

        async def write_many(request: Any, context: Context) -> None:
            await _check(context, names)
            await streaming(request, context)

        answer_many = write_many if iscoroutinefunction(streaming) else yield_many
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(answer_many, *codecs)
        return grpc.unary_stream_rpc_method_handler(answer_many, *codecs)
    single = handler.stream_unary or handler.unary_unary

    async def answer_once(request: Any, context: Context) -> Any:
        await _check(context, names)
        return await single(request, context)

    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(answer_once, *codecs)
    return grpc.unary_unary_rpc_method_handler(answer_once, *codecs)
