"""Who may call what: nodes everything, clients what is meant for them."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from disagg.tls.certificate_files import CLIENT_NAME, NODE_NAME
from disagg.tls.handlers import Context, Interceptor, looked_at

CLIENT_METHODS = frozenset({"/disagg.wire.v1.Router/Generate", "/disagg.wire.v1.Router/Match"})
"""All others are between nodes; a method that is new is closed to clients."""
NAMES_PROPERTY = "x509_subject_alternative_name"
"""Where gRPC puts the names of the certificate that the caller has proven."""


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
    """The same handler behind the check."""

    async def look(request: Any, context: Context) -> Any:
        await _check(context, names)
        return request

    return looked_at(handler, look)
