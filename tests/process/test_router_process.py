"""The router as a process: start, signals, exit codes."""

import json
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint

BOUND_S = 60
MAIN = """
import gc, sys
from disagg.router.options import RouterOptions
from disagg.router.process import run
ports = {"http_port": int(sys.argv[2]), "admin_port": 0, "grpc_port": 0}
code = run(RouterOptions(sys.argv[1], "tiny", hash_key="k" * 32, **ports))
sys.stderr.write(f"frozen {gc.get_freeze_count()}\\n")
sys.exit(code)
"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_layers=1)


@pytest.fixture
def start(model_dir):
    started = []

    def build(directory=model_dir, port=0):
        process = subprocess.Popen(
            [sys.executable, "-c", MAIN, str(directory), str(port)],
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield build
    for process in started:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def read_port(process) -> int:
    for line in process.stderr:
        found = re.search(r"router serves tiny on http://127\.0\.0\.1:(\d+)", line)
        if found:
            return int(found[1])
    raise AssertionError("the router ended before it served")


def half_a_request(port) -> socket.socket:
    """A client whose body never comes: something a clean stop has to wait for.

    The router has its head, and waits for the body, when this returns.
    """
    client = socket.create_connection(("127.0.0.1", port), timeout=BOUND_S)
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    client.sendall(f"{head}content-length: 50\r\nexpect: 100-continue\r\n\r\n".encode())
    assert client.recv(1000).startswith(b"HTTP/1.1 100 ")
    return client


def wait_refused(port) -> None:
    end = time.monotonic() + BOUND_S
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            return
    raise AssertionError("still accepts connections")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_stops_cleanly(start, number):
    process = start()
    port = read_port(process)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=BOUND_S) as answer:
        assert answer.status == 200
    process.send_signal(number)
    assert process.wait(timeout=BOUND_S) == 0
    said = process.stderr.read()
    assert "Traceback" not in said
    # What it began with is not looked through for garbage while it serves: 0 where all of it is.
    (num_frozen,) = re.findall(r"^frozen (\d+)$", said, re.MULTILINE)
    assert int(num_frozen) > 10_000


def test_a_second_signal_does_not_wait(start):
    process = start()
    port = read_port(process)
    with half_a_request(port):
        process.send_signal(signal.SIGTERM)
        wait_refused(port)
        assert process.poll() is None  # the stop is in progress
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=BOUND_S) == 130  # a stop that waited would end with 0


def test_a_router_that_cannot_start_says_why(start, tmp_path):
    process = start(tmp_path)
    assert process.wait(timeout=BOUND_S) == 2
    assert "config.json" in process.stderr.read()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start(port=taken.getsockname()[1])
        assert process.wait(timeout=BOUND_S) == 2
        assert "http_port" in process.stderr.read()


def mapped(pid: int | str, *packages: str) -> set[str]:
    """Which packages' shared libraries a process has in its memory."""
    files = Path(f"/proc/{pid}/maps").read_text()
    return {name for name in packages if f"/{name}/" in files}


def test_a_router_that_has_served_has_no_torch_and_tells_its_memory(start):
    process = start()
    line = next(line for line in process.stderr if "router serves tiny on" in line)
    http, admin = (int(port) for port in re.findall(r"http://127\.0\.0\.1:(\d+)", line))
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    told = urllib.request.Request(
        f"http://127.0.0.1:{http}/tokenize",
        json.dumps(chat).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(told, timeout=BOUND_S) as answer:
        assert json.load(answer)["count"] > 1  # it has rendered the template and tokenised
    with urllib.request.urlopen(f"http://127.0.0.1:{http}/openapi.json", timeout=BOUND_S) as page:
        assert json.load(page)["openapi"]
    with urllib.request.urlopen(f"http://127.0.0.1:{admin}/metrics", timeout=BOUND_S) as page:
        metrics = page.read().decode()
    said = re.search(r"^process_resident_memory_bytes (\S+)$", metrics, re.MULTILINE)
    assert said is not None
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    assert float(said[1]) == pytest.approx(pages * resource.getpagesize(), rel=0.5)
    absent = ("torch", "ray", "nixl_cu13", "nixl_cu12", "safetensors")
    assert mapped(process.pid, "tokenizers", *absent) == {"tokenizers"}
    # Negative control: this process has made the checkpoint, with torch.
    assert {"torch", "safetensors"} <= mapped("self", *absent)
    process.send_signal(signal.SIGTERM)
    assert process.wait(BOUND_S) == 0
