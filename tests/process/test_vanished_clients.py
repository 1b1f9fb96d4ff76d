"""Clients whose machine is gone: nothing closes their connections, and nothing more comes back."""

import json
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.checkpoints import make_checkpoint
from tests.process.harness import MODEL, WAIT_S, Cluster, running, wait_until
from tests.process.network import Network, UnavailableError, network

pytestmark = pytest.mark.timeout(600)

NUM_TOKENS = 12_000
STEPS = 4
"""After which nothing more is sent: no buffer is full, and the kernel asks nobody who owes an
acknowledgment whether it is there; it would try for a quarter of an hour.
"""
LIMITS = {"send_timeout_ms": 1_500, "worker_silent_ms": 240_000}
READ = """
import socket, sys
client = socket.create_connection((sys.argv[1], int(sys.argv[2])), 60)
client.sendall(sys.argv[3].encode())
num = 0
while data := client.recv(65536):
    num += len(data)
    print(num, flush=True)
"""


def test_who_vanishes_in_a_stream_is_given_up(tmp_path: Path) -> None:
    try:
        with network() as made:
            vanish(made, tmp_path)
    except UnavailableError as error:
        pytest.skip(f"no client ever vanished: {error}")


def vanish(made: Network, folder: Path) -> None:
    model_dir = make_checkpoint(
        folder / "model", "qwen3", num_layers=1, max_position_embeddings=16_384
    )
    cluster = Cluster(model_dir, folder, {"max_sequences": 2}, LIMITS | {"host": made.host})
    with running(cluster, w0="both"):
        there = [ask(cluster, made, n) for n in (0, 1)]
        try:
            for one in there:
                assert one.stdout is not None
                assert one.stdout.readline(), "it streams"
            held = cluster.tell("w0", "hold steps")
            cluster.wait_told("w0", "held steps", held)
            made.lose(0)
            cluster.tell("w0", f"pass steps {STEPS}")
            wait_until(lambda: cluster.record("client-0")["outcome"], "its end")
            assert cluster.record("client-0")["outcome"] == "cancelled"
            # Control: who is there still reads on.
            before = cluster.record("client-1")
            assert not before["outcome"]
            cluster.tell("w0", "pass steps")
            wait_until(
                lambda: cluster.record("client-1")["num_tokens"] > before["num_tokens"],
                "more tokens",
            )
        finally:
            for one in there:
                one.kill()
                one.communicate(timeout=WAIT_S)
        cluster.wait_quiescent()


def ask(cluster: Cluster, made: Network, n: int) -> "subprocess.Popen[bytes]":
    """A client that reads its answer, at a place of its own."""
    where = urlsplit(cluster.url)
    body = json.dumps(
        {
            "model": MODEL,
            "prompt": [5, 6, 7 + n],
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
    )
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        f"x-request-id: client-{n}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    python = [*made.places[n].command, sys.executable, "-c", READ]
    return subprocess.Popen(
        [*python, made.host, str(where.port), head + body], stdout=subprocess.PIPE
    )
