"""Routers are asked what requests wait; one that does not answer stops the automatic mode."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from disagg.cluster import load_watch
from disagg.cluster.counts import Counts
from disagg.cluster.load_watch import LoadWatch, watch_load
from disagg.config import Settings
from disagg.errors import ConfigError

BOUND_S = 60.0
KEY = "secret"


class _Router(BaseHTTPRequestHandler):
    waits: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:  # the library's name
        allowed = self.headers.get("Authorization") == f"Bearer {KEY}"
        is_there = self.path == "/v1/disagg/queues"
        body = json.dumps({"waits": self.waits}).encode()
        self.send_response(200 if allowed and is_there else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing on the screen."""


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Router)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    serving.join()


def watching(tmp_path: Path, **autoscale: Any) -> LoadWatch:
    key = tmp_path / "key"
    key.write_text(KEY + "\n")
    given = {"prefill": "1-3", "target_queue_ms": 50, "up_after_ms": 1, "api_key_file": str(key)}
    found = watch_load(Settings.model_validate({"autoscale": given | autoscale}))
    assert found is not None
    return found


def test_one_that_is_closed_asks_nobody(tmp_path: Path, url: str) -> None:
    before = set(threading.enumerate())
    watch = watching(tmp_path, router_urls=[url])
    (thread,) = {one for one in threading.enumerate() if one.name == "load watch"} - before
    watch.close()
    thread.join(BOUND_S)
    assert not thread.is_alive()


def test_what_does_not_answer_any_more_once_it_is_closed_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Routers end before their workers: a call may be on its way."""
    watch = watching(tmp_path, router_urls=["http://127.0.0.1:9"])
    monkeypatch.setattr(watch, "_ask", None)
    watch._hear("http://127.0.0.1:7")
    assert ":7 does not say" in caplog.text  # control
    watch.close()
    watch._hear("http://127.0.0.1:8")
    assert ":8 does not say" not in caplog.text


def grows(watch: LoadWatch) -> bool:
    decided, why = watch.decide(Counts(1, 1), {"p": "prefill", "d": "decode"})
    assert bool(why) == (decided != Counts(1, 1))
    return decided == Counts(2, 1)


def test_long_waits_make_one_more(tmp_path: Path, url: str) -> None:
    _Router.waits = [{"role": "prefill", "age_ms": 0, "waited_ms": 9_000}]
    watch = watching(tmp_path, router_urls=(url,))
    deadline = time.monotonic() + BOUND_S
    while not grows(watch):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("wrong", ["nobody there", "wrong key"])
def test_a_router_that_is_away_or_refuses_the_key_changes_nothing(
    tmp_path: Path, url: str, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    _Router.waits = [{"role": "prefill", "age_ms": 0, "waited_ms": 9_000}]
    changed: dict[str, Any] = {"router_urls": (url, "http://127.0.0.1:1")}
    if wrong == "wrong key":
        changed = {"router_urls": (url,), "api_key_file": ""}
    watch = watching(tmp_path, **changed)
    deadline = time.monotonic() + BOUND_S
    while "nothing is scaled meanwhile" not in caplog.text:
        assert time.monotonic() < deadline
        assert not grows(watch)
        time.sleep(0.05)
    assert not grows(watch)


def test_a_key_that_is_replaced_is_used_without_a_restart(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _Router.waits = [{"role": "prefill", "age_ms": 0, "waited_ms": 9_000}]
    monkeypatch.setattr(load_watch, "_POLL_S", 0.05)
    watch = watching(tmp_path, router_urls=(url,))
    deadline = time.monotonic() + BOUND_S
    (tmp_path / "key").unlink()  # as in the moment in which a secret is mounted anew
    while "No such file" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (tmp_path / "key").write_text("revoked")
    while "401" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (tmp_path / "key").write_text(KEY)
    while not grows(watch):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    watch.close()


def name_routers(monkeypatch: pytest.MonkeyPatch, port: int, *hosts: str) -> None:
    """Let routers.test have these addresses, and one of the other kind; none: it is unknown."""
    look_up = socket.getaddrinfo

    def named(host: str, *rest: Any, **more: Any) -> Any:
        if host != "routers.test":
            return look_up(host, *rest, **more)
        if not hosts:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in hosts]
        return [*found, (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", named)


def test_every_address_of_a_name_is_asked(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a headless Service; a host with an address of each kind is one router.

    One that does not answer may start or hang; after a while it is none.
    """
    port = int(url.rpartition(":")[2])
    _Router.waits = [{"role": "prefill", "age_ms": 0, "waited_ms": 9_000}]
    name_routers(monkeypatch, port, "127.0.0.1", "127.0.0.2")
    monkeypatch.setattr(load_watch, "_GONE_S", BOUND_S)
    watch = watching(tmp_path, router_urls=(f"dns:routers.test:{port}",))
    deadline = time.monotonic() + BOUND_S
    while f"http://127.0.0.2:{port} does not say" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not grows(watch)
    assert "::1" not in caplog.text
    monkeypatch.setattr(load_watch, "_GONE_S", 0.5)
    while not grows(watch):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    watch.close()


@pytest.mark.parametrize("known", [True, False])
def test_a_name_without_a_router_that_answers_scales_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, known: bool
) -> None:
    name_routers(monkeypatch, 1, *(["127.0.0.1", "127.0.0.2"] if known else []))
    monkeypatch.setattr(load_watch, "_GONE_S", 0.0)
    watch = watching(tmp_path, router_urls=("dns:routers.test:1",))
    said = "http://127.0.0.2:1 does not say" if known else "dns:routers.test:1 is not known"
    deadline = time.monotonic() + BOUND_S
    while said not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert watch._waits() is None
    watch.close()


def test_a_url_is_one_router_whatever_addresses_its_host_has(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be a load balancer's: the same waits would be counted for each."""
    port = int(url.rpartition(":")[2])
    _Router.waits = [{"role": "prefill", "age_ms": 0, "waited_ms": 9_000}]
    name_routers(monkeypatch, port, "127.0.0.1", "127.0.0.2")
    watch = watching(tmp_path, router_urls=(f"http://routers.test:{port}",))
    deadline = time.monotonic() + BOUND_S
    while (waits := watch._waits()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(waits["prefill"]) == 1
    watch.close()


def test_nothing_that_a_call_raises_ends_the_watch(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _Router.waits = [{"role": "prefill", "age_ms": 0, "waited_ms": 9_000}]
    with monkeypatch.context() as broken:
        broken.setattr(load_watch, "call", lambda *_: 1 / 0)
        watch = watching(tmp_path, router_urls=(url,))
        deadline = time.monotonic() + BOUND_S
        while "division by zero" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    while not grows(watch):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    watch.close()


def test_every_process_of_a_router_is_asked(
    url: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text(KEY)
    port = int(url.rpartition(":")[2])
    given = {"prefill": "1-3", "target_queue_ms": 50, "up_after_ms": 1, "api_key_file": str(key)}
    router = {"processes": 2, "admin_port": port}
    assert watch_load(Settings.model_validate({"autoscale": given, "router": router})) is not None
    deadline = time.monotonic() + BOUND_S
    while f"http://127.0.0.1:{port + 1} does not say" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert f"{url} does not say" not in caplog.text


def test_it_is_off_unless_a_range_is_given() -> None:
    assert watch_load(Settings()) is None


def test_a_key_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"autoscale\.api_key_file"):
        watching(tmp_path, api_key_file=str(tmp_path / "none"))
    two = tmp_path / "two"
    two.write_text(f"{KEY}\n{KEY}\n")
    with pytest.raises(ConfigError, match=r"autoscale\.api_key_file") as found:
        watching(tmp_path, api_key_file=str(two))
    assert KEY not in found.value.message


@pytest.mark.parametrize(
    "given",
    [{"prefill": "0-3"}, {"decode": "4-2"}, {"both": "1"}, {"prefill": "1-1025"},
     {"router_urls": ("router:8001",)}, {"router_urls": ("http://router:99999",)},
     {"router_urls": ("http://[::1",)}, {"router_urls": ("http://",)},
     {"router_urls": ("dns:router",)}, {"router_urls": ("dns:router:99999",)},
     {"router_urls": ("http://router:8001", "http://dns:router:8001")}],
)  # fmt: skip
def test_ranges_and_urls_are_checked(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        Settings.model_validate({"autoscale": given})
