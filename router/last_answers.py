"""A router whose place another one has taken: connections end with their next answer."""

from disagg.router.cross_origin import App
from disagg.router.http_exchange import Message, Receive, Scope, Send


class LastAnswers:
    """An ASGI application around another one.

    Attributes:
        is_on: from now on answers say that their connection is closed.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self.is_on = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""

        async def closing(message: Message) -> None:
            if self.is_on and message["type"] == "http.response.start":
                headers = [one for one in message["headers"] if one[0] != b"connection"]
                message["headers"] = [*headers, (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, closing)
