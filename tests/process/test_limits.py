"""Limits in real processes: clients on raw sockets that are slow on purpose, and what they hold."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.checkpoints import make_checkpoint
from tests.process.harness import MODEL, WAIT_S, Cluster, running, wait_until

pytestmark = pytest.mark.timeout(600)

NUM_TOKENS = 1_500
LIMITS: dict[str, Any] = {
    "unread_tokens_max": 64,
    "send_buffer_bytes": 4096,
    "receive_timeout_ms": 1000,
    "receive_bytes_per_s_min": 2000,
    "worker_waiting_max": 0,
    "worker_silent_ms": 60_000,
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("limits")
    model_dir = make_checkpoint(
        folder / "model", "qwen3", num_layers=1, max_position_embeddings=2048
    )
    house = Cluster(model_dir, folder, {"max_sequences": 2}, LIMITS)
    with running(house, p0="prefill", d0="decode"):
        yield house


def body_of(**changes: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": list(range(5, 105)),
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "logprobs": 5,
        "stream": True,
    } | changes


def connect(cluster: Cluster) -> socket.socket:
    """With the smallest of receive buffers: the rest waits at the router."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(WAIT_S)
    where = urlsplit(cluster.url)
    client.connect((where.hostname, where.port))
    return client


def head(name: str, size: int) -> bytes:
    return (
        f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        f"x-request-id: {name}\r\ncontent-length: {size}\r\nconnection: close\r\n\r\n"
    ).encode()


def read_all(client: socket.socket) -> bytes:
    said = b""
    while data := client.recv(65536):
        said += data
    client.close()
    return said


def test_who_does_not_read_holds_no_kv(cluster: Cluster) -> None:
    data = json.dumps(body_of()).encode()
    slow = connect(cluster)
    slow.sendall(head("slow", len(data)) + data)
    wait_until(lambda: cluster.record("slow")["outcome"] == "cancelled", "it to be given up")
    assert cluster.record("slow")["num_tokens"] < NUM_TOKENS
    # Control: who reads gets all of the same request.
    headers = {"x-request-id": "reading"}
    answer = cluster.http.post("/v1/completions", json=body_of(), headers=headers)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert cluster.record("reading")["num_tokens"] == NUM_TOKENS
    cluster.wait_quiescent()
    said = read_all(slow)
    assert b'"code":"slow_reader"' in said
    assert b"[DONE]" not in said


def test_who_sends_slowly_is_answered_and_keeps_nobody_waiting(cluster: Cluster) -> None:
    data = json.dumps(body_of()).encode().ljust(20_000)
    before = {name: cluster.counts(name)["messages"] for name in cluster.workers}
    client = connect(cluster)
    client.sendall(head("drip", len(data)))
    client.setblocking(False)
    said, end = b"", time.monotonic() + WAIT_S
    for byte in data:
        with contextlib.suppress(ConnectionError):  # what it said before is still to be read
            client.send(bytes([byte]))
        try:
            said = client.recv(65536)
        except BlockingIOError:
            time.sleep(0.02)
            assert time.monotonic() < end, "it is still waited for"
            continue
        break
    client.close()
    assert said.startswith(b"HTTP/1.1 408 ")
    assert b"limits.receive_timeout_ms" in said
    assert {name: cluster.counts(name)["messages"] for name in cluster.workers} == before
    quick = cluster.http.post("/v1/completions", json=body_of(stream=False, max_tokens=3))
    assert quick.status_code == 200  # control


def test_more_than_the_workers_run_waits_at_the_router_and_all_are_served(cluster: Cluster) -> None:
    most = [0]

    def ask(number: int) -> int:
        body = body_of(stream=False, max_tokens=60, prompt=[5 + number] * 40)
        answer = cluster.http.post("/v1/completions", json=body).json()
        return int(answer["usage"]["completion_tokens"])

    def look() -> bool:
        most[0] = max(most[0], cluster.http.get("/health").json()["num_waiting"])
        return most[0] >= 3

    with ThreadPoolExecutor(10) as threads:
        asked = [threads.submit(ask, number) for number in range(10)]
        wait_until(lambda: look() or all(one.done() for one in asked), "requests to wait")
        assert [one.result(WAIT_S) for one in asked] == [60] * 10
    assert most[0] >= 3  # they waited here; the workers run two
    cluster.wait_quiescent()
