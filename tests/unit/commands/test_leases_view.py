"""`disagg leases` where no router is, or something else answers in its place."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from rich.console import Console

from disagg.commands.leases import draw
from disagg.commands.leases_view import WorkerAddress, WorkerLeases, ask_workers, find_workers
from disagg.errors import ConfigError, RemoteFault


class Answers(BaseHTTPRequestHandler):
    """Says what the test planted, by the first part of the path."""

    def do_GET(self) -> None:
        status, body = {
            "/none": (404, b"{}"),
            "/text": (200, b"hello"),
            "/list": (200, b"[]"),
            "/bare": (200, b'{"workers": [{"info": {}}]}'),
            "/odd": (
                200,
                b'{"workers": [{"info": {"incarnation": {"worker_id": 1, "epoch": "e"},'
                b' "role": "prefill", "address": "a:1"}}]}',
            ),
            "/good": (
                200,
                b'{"workers": [{"info": {"incarnation": {"worker_id": "w", "epoch": "e"},'
                b' "role": "prefill", "address": "127.0.0.1:1"}}]}',
            ),
        }["/" + self.path.split("/")[1]]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Be quiet."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(10)
    server.server_close()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("none", "answered 404"),
        ("text", "did not answer as a router"),
        ("list", "did not answer as a router"),
        ("bare", "did not answer as a router"),
        ("odd", "described by texts"),
    ],
)
def test_what_is_no_router_is_named(url: str, path: str, said: str) -> None:
    with pytest.raises(RemoteFault, match=said):
        find_workers(f"{url}/{path}", 5)


def test_a_routers_answer_is_read(url: str) -> None:
    known = WorkerAddress("w", "e", "prefill", "127.0.0.1:1")
    assert find_workers(f"{url}/good", 5) == [known]
    (answer,) = ask_workers([known], 5, "")
    assert answer.status is None
    assert answer.error.startswith("UNAVAILABLE")
    assert "--tls-directory" in answer.error


def test_nobody_answers_there() -> None:
    with pytest.raises(RemoteFault, match="no router answers at http://127"):
        find_workers("http://127.0.0.1:1", 5)
    with pytest.raises(ConfigError, match="no http:// URL"):
        find_workers("127.0.0.1:8000", 5)


def test_what_somebody_else_says_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    answer = WorkerLeases(WorkerAddress("w[b]", "e", "[/x]", "a:1"), None, "[red]no")
    Console(width=160).print(draw([answer]))
    said = capsys.readouterr().out
    assert all(text in said for text in ("w[b]", "[/x]", "[red]no"))
