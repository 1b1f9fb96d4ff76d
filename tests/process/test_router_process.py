"""The router as a process: start, signals, exit codes."""

import json
import re
import resource
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint

BOUND_S = 60
NUM_PAGES = 16
"""As many as may wait on a connection: more than buffers hold."""
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

    def build(directory=model_dir, port=0, before=()):
        process = subprocess.Popen(
            [*before, sys.executable, "-c", MAIN, str(directory), str(port)],
            stderr=subprocess.PIPE,
            text=True,
            # Tests may be run by nohup, which all children inherit.
            preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),
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


def wait_draining(process) -> None:
    assert any("draining: " in line for line in process.stderr)


def reads_nothing(port) -> socket.socket:
    """A client that asks for large pages and takes none: something a clean stop has to wait for."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(NUM_PAGES * b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n")
    assert client.recv(9) == b"HTTP/1.1 "
    return client


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
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
    with reads_nothing(port):
        process.send_signal(signal.SIGTERM)
        wait_draining(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=BOUND_S) == 130  # a stop that waited would end with 0


def test_a_closed_terminal_may_say_it_twice_or_nohup_keep_it(start):
    process = start()
    with reads_nothing(read_port(process)) as client:
        process.send_signal(signal.SIGHUP)
        wait_draining(process)
        process.send_signal(signal.SIGHUP)
        client.close()
        assert process.wait(timeout=BOUND_S) == 0
    process = start(before=["nohup"])
    port = read_port(process)
    process.send_signal(signal.SIGHUP)
    with pytest.raises(urllib.error.HTTPError) as unready:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=BOUND_S)
    assert json.load(unready.value)["status"] != "stopping"


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
