"""A client's connection: HTTP/1.1 parsed by httptools within bounds, and answers written to it.

httptools takes some of what HTTP/1.1 forbids and no bound on what it keeps: `http_head` and
`data_received` add both. Requests that come before their turn wait, a few of them.
"""

import asyncio
import logging
import re
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from disagg.errors import CapacityError, DisaggError, StoppingError
from disagg.router.http_cycle import Cycle, ServerState
from disagg.router.http_exchange import CONNECTION, HeadTooLargeError
from disagg.router.http_head import check_head, check_line, no_http, path_of
from disagg.router.openai.errors import error_body
from disagg.router.openai.sse import to_json
from disagg.router.options import RouterOptions
from disagg.router.patience import Patience

logger = logging.getLogger(__name__)

FRAMING = (b"content-length", b"transfer-encoding")
EMPTY_LINES = re.compile(rb"\r\n\r\n[\r\n]*")
"""What ends a head, or a body in chunks, and may be behind either."""
REST_OF_EMPTY_LINES = re.compile(rb"[\r\n]+")
"""Of those that began in the packet before."""
WAITING_MAX = 16
"""Requests that one connection sends before those ahead of them are answered."""
IDLE_MIN_S = 1.0
"""Who has been idle for less keeps its place: what it has sent may not have been read yet."""
FULL_LOG_S = 10.0
"""Between two lines that say that there are as many connections as may be."""
STOP_GRACE_S = 1.0
"""Until who does not take the last of an answer is cut off, once the server ends."""


class TooManyConnectionsError(CapacityError):
    """The router has as many connections as it takes."""

    http_status = 503
    code = "too_many_connections"


def protocol_of(options: RouterOptions, state: ServerState) -> type[HttpToolsProtocol]:
    """The protocol of a server's connections, within the bounds of its options."""
    idle: dict[Any, None] = {}  # between requests or in a head, the longest first
    again_s = 0.0

    class BoundedProtocol(HttpToolsProtocol):
        """Closes connections whose client sends no whole head, or does not take its answer.

        uvicorn's timer of idle connections begins after an answer and stops at any byte. Here it
        also begins with the connection, and only a whole head stops it. Writing pauses as soon as
        the kernel takes no more, so while it is paused what is left only shrinks as the client
        reads: if it does not, the connection is cut, whoever waits for it and whatever was sent.
        """

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.timeout_keep_alive = options.receive_timeout_ms / 1000  # type: ignore[assignment]
            self._unsent_timer: asyncio.TimerHandle | None = None
            self._idle_since_s: float | None = None
            self._is_in_head = False
            self._pieces: list[bytes] = []  # of the head that is being read
            self._num_body_bytes_left = 0  # of a body with a length
            self._is_resumed = False
            self._has_moved = False
            self._num_unframed = 0
            self._fault: DisaggError | None = None
            self._served: Cycle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=0)
            if len(self.connections) > options.connections_max and not self._takes_an_idle_ones():
                self._end_with(
                    TooManyConnectionsError(
                        f"there are {options.connections_max} connections (limits.connections_max)",
                        retry_after_s=1,
                    )
                )
                return
            self._is_idle()
            self._watch_idle()

        def connection_lost(self, exc: Exception | None) -> None:
            idle.pop(self, None)
            self._unset_keepalive_if_required()
            self._stop_unsent_timer()
            super().connection_lost(exc)
            waiting = [cycle for cycle, _ in self.pipeline]
            for cycle in (self._served, *waiting):
                if isinstance(cycle, Cycle):
                    cycle.lost()
            self.pipeline.clear()

        # --- what comes

        def data_received(self, data: bytes) -> None:
            if self._fault is not None:
                return  # nothing behind it counts
            self._has_moved = False
            try:
                at = 0
                while at < len(data):
                    at = self._feed(data, at)
            except httptools.HttpParserError as error:
                cause = error.__context__
                known = isinstance(cause, DisaggError)
                self._refuse(cause if known else no_http(f": {error}"))  # type: ignore[arg-type]
                return
            # Of a head, of trailers, of a chunk's size: what the parser keeps or drops by itself.
            self._num_unframed = 0 if self._has_moved else self._num_unframed + len(data)
            if self._num_unframed > options.header_bytes_max:
                self._refuse(
                    HeadTooLargeError(
                        f"the request line and headers have more than {options.header_bytes_max} "
                        "bytes (limits.header_bytes_max)"
                    )
                )

        def _feed(self, data: bytes, start: int) -> int:
            """Give the parser a part in which no head begins but at its start; returns its end."""
            if left := self._num_body_bytes_left:
                end = start + left
            else:
                rest = REST_OF_EMPTY_LINES.match(data, start)
                found = rest or EMPTY_LINES.search(data, start)
                end = found.end() if found else len(data)
            part = data[start:end]
            self._pieces.append(part)
            try:
                self.parser.feed_data(part)
            except httptools.HttpParserUpgrade as upgrade:
                # Nothing else is spoken here. The parser has left the body to the new protocol.
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                fields = [field for field in self.headers if field[0] in FRAMING]
                if not self.cycle.keep_alive:
                    fields.append((b"connection", b"close"))
                head = b"".join(b"%b: %b\r\n" % field for field in fields)
                self._is_resumed = True
                self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % head)
                self._is_resumed = False
                self.parser.feed_data(part[upgrade.args[0] :])
            if not self._is_in_head:
                self._pieces = []
            return start + len(part)

        def on_message_begin(self) -> None:
            if not self._is_resumed:
                self.url, self.headers = b"", []
                self.expect_100_continue = False
                self._is_in_head = True

        def on_url(self, url: bytes) -> None:
            if not self._is_resumed:
                self.url += url

        def on_header(self, name: bytes, value: bytes) -> None:
            # Trailers are none of them. One too many is enough to see that there are too many.
            if self._is_in_head and len(self.headers) <= options.headers_max:
                # Blanks behind a value are none of it; the parser takes those before it alone.
                name, value = name.lower(), value.rstrip(b" \t")
                self.headers.append((name, value))
                if name == b"expect":
                    self.expect_100_continue = value.lower() == b"100-continue"

        def on_headers_complete(self) -> None:
            if self._is_resumed:
                return
            self._is_in_head, self._has_moved = False, True
            self._idle_since_s = None
            idle.pop(self, None)
            version = self.parser.get_http_version()
            check_head(version, self.url, self.headers)
            line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version.encode())
            check_line(line, b"".join(self._pieces))
            lengths = (int(value) for name, value in self.headers if name == b"content-length")
            self._num_body_bytes_left = next(lengths, 0)
            if len(self.pipeline) >= WAITING_MAX:
                raise CapacityError(
                    f"more than {WAITING_MAX} requests wait on this connection", retry_after_s=1
                )
            target, _, query = self.url.partition(b"?")
            path = path_of(target).decode("ascii")
            self.scope = {  # type: ignore[typeddict-item]
                "type": "http",
                "client": self.client,
                "http_version": version,
                "method": self.parser.get_method().decode("ascii"),
                "path": unquote(path) if "%" in path else path,
                "raw_path": target,
                "query_string": query,
                "headers": self.headers,
            }
            self.cycle = cycle = Cycle(
                state,
                scope=self.scope,
                transport=self.transport,
                flow=self.flow,
                logger=self.logger,
                access_logger=self.access_logger,
                access_log=False,
                default_headers=self.server_state.default_headers,
                message_event=asyncio.Event(),
                expect_100_continue=self.expect_100_continue and version == "1.1",
                keep_alive=version == "1.1"
                and len(self.headers) <= options.headers_max  # else some are not known
                and self.parser.should_keep_alive(),
                on_response=self.on_response_complete,
            )
            self.scope[CONNECTION] = cycle  # type: ignore[literal-required]
            if self._served is None:
                self._start_asgi_task(cycle, self.app)
            else:  # read on: while nothing is read nobody notices that the client has left
                self.pipeline.appendleft((cycle, self.app))

        def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
            assert isinstance(cycle, Cycle)
            self._served = cycle
            super()._start_asgi_task(cycle, app)

        def on_body(self, body: bytes) -> None:
            self._has_moved = True
            if self._num_body_bytes_left:
                self._num_body_bytes_left -= len(body)
            cycle = self.cycle
            if cycle.response_complete:
                return
            cycle.body += body
            waiting = sum(len(one.body) for one, _ in self.pipeline)
            if max(len(cycle.body), waiting) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            cycle.message_event.set()

        def on_message_complete(self) -> None:
            if self.parser.should_upgrade():  # its body follows
                return
            self._has_moved = True
            self.cycle.more_body = False
            self.cycle.message_event.set()

        # --- what is refused

        def _refuse(self, fault: DisaggError) -> None:
            """Answer what is no request, in its turn, and close."""
            if self.cycle is not None and self.cycle.more_body:  # it is in a body
                if self.pipeline:
                    self.pipeline.popleft()
                    self._fault = fault
                else:
                    self._end_with(None if self.cycle.response_started else fault)
            elif self._served is not None:
                self._fault = fault
            else:
                self._end_with(fault)

        def _end_with(self, fault: DisaggError | None) -> None:
            if fault is not None:
                self.transport.write(_raw_answer(fault))
            self.transport.close()

        def on_response_complete(self) -> None:
            self._served = None
            if self.transport.is_closing():
                return
            if self.pipeline:
                self.flow.resume_reading()
                self._start_asgi_task(*self.pipeline.pop())
            elif self._fault is None:
                self.flow.resume_reading()
                self._is_idle()
            else:
                self._end_with(self._fault)

        def shutdown(self) -> None:
            """Answer what has not come whole, and wait for nobody who does not read."""
            if self.cycle is not None and self.cycle.more_body:
                self._refuse(StoppingError())
            self.loop.call_later(STOP_GRACE_S, self._cut_if_unread)
            super().shutdown()

        def _cut_if_unread(self) -> None:
            if self.flow.write_paused:
                self.transport.abort()

        # --- who sends nothing

        def _is_idle(self) -> None:
            self._idle_since_s = self.loop.time()
            idle[self] = None

        def _has_been_idle_for(self, idle_s: float) -> bool:
            since_s = self._idle_since_s
            return since_s is not None and self.loop.time() - since_s >= idle_s

        def _takes_an_idle_ones(self) -> bool:
            """Close the connection that has been idle for longest, if there is one.

            Else whoever opens as many as there may be, without a key, keeps everybody out.
            """
            nonlocal again_s
            longest = next((one for one in idle if not one.flow.write_paused), None)
            if longest is None or not longest._has_been_idle_for(IDLE_MIN_S):
                return False
            del idle[longest]
            longest.transport.close()
            if self.loop.time() >= again_s:
                again_s = self.loop.time() + FULL_LOG_S
                logger.warning(
                    "there are %d connections (limits.connections_max): those that have been idle "
                    "for longest are closed for new ones",
                    options.connections_max,
                )
            return True

        def _watch_idle(self) -> None:
            """Close the connection once it has been idle for too long.

            One timer looks now and then: one of each request's own takes longer than its parsing.
            """
            now_s = self.loop.time()
            idle_s = 0.0 if self._idle_since_s is None else now_s - self._idle_since_s
            if idle_s >= self.timeout_keep_alive:
                self.timeout_keep_alive_handler()
            else:
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive - idle_s, self._watch_idle
                )

        # --- who does not read

        def pause_writing(self) -> None:
            super().pause_writing()
            patience = Patience(
                self.loop.time(), options.send_timeout_ms / 1000, options.send_bytes_per_s_min
            )
            self._unsent_timer = self.loop.call_later(
                patience.left_s(self.loop.time()),
                self._check_unsent,
                patience,
                self.transport.get_write_buffer_size(),
            )

        def resume_writing(self) -> None:
            self._stop_unsent_timer()
            super().resume_writing()

        def _check_unsent(self, patience: Patience, num_unsent: int) -> None:
            left = self.transport.get_write_buffer_size()
            # More than before: the end of the same answer was written behind it.
            patience.moved(self.loop.time(), max(0, num_unsent - left))
            wait_s = patience.left_s(self.loop.time())
            if wait_s > 0:
                self._unsent_timer = self.loop.call_later(
                    wait_s, self._check_unsent, patience, left
                )
                return
            logger.warning("%s does not read its answer: it is cut off", self.client)
            self.transport.abort()

        def _stop_unsent_timer(self) -> None:
            if self._unsent_timer is not None:
                self._unsent_timer.cancel()
                self._unsent_timer = None

    return BoundedProtocol


def _raw_answer(error: DisaggError) -> bytes:
    """A whole answer for a connection that has no request, and is closed after it."""
    data = to_json(error_body(error))
    phrase = HTTPStatus(error.http_status).phrase
    retry = f"retry-after: {error.retry_after_s}\r\n" if error.retry_after_s else ""
    head = (
        f"HTTP/1.1 {error.http_status} {phrase}\r\n{retry}"
        "content-type: application/json\r\n"
        f"content-length: {len(data)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + data
