"""Calls with a key: to the address that was given alone, and bounded as a whole."""

import importlib
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.error import HTTPError
from urllib.request import Request

import pytest

from disagg.cluster import http_calls
from disagg.commands.fleet_requests import RunningFleet
from disagg.commands.router_client import call_router
from disagg.commands.transfer_findings import Ports, _hand_over
from disagg.errors import ConfigError, RemoteFault

TIMEOUT_S = 30.0
KEY = "secret"


class _Server(BaseHTTPRequestHandler):
    heard: ClassVar[list[tuple[int, str]]] = []
    moved_to: ClassVar[str] = ""
    body: ClassVar[bytes] = b"{}"
    slow: ClassVar[bool] = False
    status: ClassVar[int] = 200

    def do_GET(self) -> None:  # the library's name
        port = self.connection.getsockname()[1]
        self.rfile.read(int(self.headers.get("Content-Length", 0)))  # or the end is a reset
        self.heard.append((port, self.headers.get("Authorization", "")))
        self.send_response(302 if self.moved_to else self.status)
        self.send_header("Location", self.moved_to)
        self.end_headers()
        try:
            for number in range(len(self.body)):
                self.wfile.write(self.body[number : number + 1] if self.slow else self.body)
                if not self.slow:
                    break
                time.sleep(0.05)
        except OSError:
            pass  # nobody waits for the rest

    do_POST = do_PUT = do_GET

    def log_message(self, *_: object) -> None:
        """Nothing on the screen."""


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Starts servers of that kind, each with a port of its own."""
    monkeypatch.setattr(_Server, "heard", [])
    monkeypatch.setenv("DISAGG_API_KEY", KEY)
    servers: list[ThreadingHTTPServer] = []

    def start() -> str:
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), _Server))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


CALLS: dict[str, Callable[[str], object]] = {
    "router": lambda url: call_router(url, "/x", TIMEOUT_S, scope="observe"),
    "fleet": lambda url: RunningFleet(url, "m").ask_at_once([[1]]),
    "transfer": lambda url: _hand_over(Ports(url, url, TIMEOUT_S), "m", 1),
}


@pytest.mark.parametrize("by", CALLS)
def test_a_key_follows_no_redirect(
    serve: Callable[[], str], monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    url, other = serve(), serve()
    monkeypatch.setattr(_Server, "moved_to", f"{other}/here")
    with pytest.raises(RemoteFault, match=f"answered 302.*{other}/here"):
        CALLS[by](url)
    assert _Server.heard == [(port_of(url), f"Bearer {KEY}")]


@pytest.mark.parametrize("by", CALLS)
def test_a_key_that_no_header_can_have_is_named_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    for given in (f"{KEY}\r\n{KEY}", f"{KEY}\udcff", f"{KEY}€", f"{KEY}\x1b"):
        monkeypatch.setenv("DISAGG_API_KEY", given)
        with pytest.raises(ConfigError, match="DISAGG_API_KEY") as found:
            CALLS[by]("http://127.0.0.1:1")
        assert KEY not in found.value.message


def test_the_end_of_a_line_is_no_part_of_a_key(
    serve: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISAGG_API_KEY", f"{KEY}\r\n")
    CALLS["router"](serve())
    assert [key for _, key in _Server.heard] == [f"Bearer {KEY}"]


def test_who_gets_no_answer_is_told_that_it_may_be_done(
    serve: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Server, "body", b"{" + b" " * 200 + b"}")
    monkeypatch.setattr(_Server, "slow", True)
    url = serve()
    for body, said in ((None, "s$"), ({}, "may do what was asked")):
        with pytest.raises(RemoteFault, match=said):
            call_router(url, "/x", 0.5, scope="administer", put=body)
    with pytest.raises(RemoteFault, match=r"refused$"):
        call_router("http://127.0.0.1:1", "/x", 5, scope="administer", put={})


def test_a_url_that_is_none_is_said() -> None:
    with pytest.raises(RemoteFault, match="nobody answers at router/v1/completions"):
        _hand_over(Ports("http://127.0.0.1:1", "router", 1.0), "m", 1)


def test_a_key_goes_to_no_proxy(serve: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    proxy, url = serve(), serve()
    monkeypatch.setenv("http_proxy", proxy)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    importlib.reload(http_calls)  # urllib reads the environment when an opener is made
    asked = Request(url, headers={"Authorization": f"Bearer {KEY}"})
    assert http_calls.call(asked, TIMEOUT_S, 1_000) == b"{}"
    assert _Server.heard == [(port_of(url), f"Bearer {KEY}")]
    urllib.request.build_opener().open(Request("http://elsewhere.invalid")).close()
    assert [port for port, _ in _Server.heard][1:] == [port_of(proxy)], "control"


@pytest.mark.parametrize("by", ["router", "fleet"])
def test_json_that_is_too_deep_is_none(
    serve: Callable[[], str], monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr(_Server, "body", b'data: {"a":' * (by == "fleet") + b"[" * 100_000)
    with pytest.raises(RemoteFault, match="did not answer as a router does"):
        CALLS[by](serve())


@pytest.mark.parametrize("status", [200, 404])
def test_an_answer_that_comes_byte_by_byte_is_bounded(
    serve: Callable[[], str], monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(_Server, "status", status)
    monkeypatch.setattr(_Server, "body", b"{" + b" " * 200 + b"}")
    monkeypatch.setattr(_Server, "slow", True)
    with pytest.raises(TimeoutError, match=r"no whole answer within 0\.5 s"):
        http_calls.call(Request(serve()), 0.5, 1_000)


def test_what_an_error_says_is_read(
    serve: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Server, "status", 404)
    monkeypatch.setattr(_Server, "body", b"no such page")
    with pytest.raises(HTTPError, match="404") as caught:
        http_calls.call(Request(serve()), TIMEOUT_S, 1_000)
    assert caught.value.read() == b"no such page"
