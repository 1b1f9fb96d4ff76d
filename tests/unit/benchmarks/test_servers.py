"""What the benchmarks start is what they say, and ends with all its processes."""

import sys
from pathlib import Path

import pytest

from benchmarks.servers import program as program_module
from benchmarks.servers.environment import check_python, vllm_release
from benchmarks.servers.program import Program, free_port
from benchmarks.servers.vllm import UNHINDERED, Plan
from disagg.cluster.processes import is_alive

SERVER = """
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

subprocess.Popen(["sleep", "600"])
HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


@pytest.fixture(autouse=True)
def _is_soon_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has started hears of no SIGTERM and is waited for."""
    monkeypatch.setattr(program_module, "END_S", 1)


def _serve(tmp_path: Path) -> Program:
    port = free_port()
    command = [sys.executable, "-c", SERVER, str(port)]
    return Program(command, {}, tmp_path / "log", f"http://127.0.0.1:{port}")


def test_a_program_ends_with_all_that_it_started(tmp_path: Path) -> None:
    program = _serve(tmp_path)
    program.wait_ready()
    processes = program.processes()
    assert len(processes) == 2
    assert program.cpu_s() > 0  # it has imported something
    program.end()
    assert not any(is_alive(process) for process in processes)


def test_a_program_that_was_killed_starts_again(tmp_path: Path) -> None:
    program = _serve(tmp_path)
    program.wait_ready()
    before = program.processes()
    program.kill()
    assert not any(is_alive(process) for process in before)
    program.start()
    program.wait_ready()
    after = program.processes()
    program.end()
    assert not before & after
    assert not any(is_alive(process) for process in after)


def test_a_program_that_ends_shows_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    program = Program(command, {}, tmp_path / "log", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(RuntimeError, match=r"log has ended:\nno such model"):
        program.wait_ready()


def test_vllm_is_hindered_unless_it_is_said() -> None:
    plan = Plan("one", Path("/model"), 1_024, 32)
    assert "PYTHONPATH" not in plan.environment()
    assert "NixlConnector" not in " ".join(plan.command(Path("/python")))
    unhindered = Plan("one", Path("/model"), 1_024, 32, unhindered=True, hands_over=True)
    assert unhindered.environment()["PYTHONPATH"] == str(UNHINDERED)
    assert (UNHINDERED / "sitecustomize.py").exists()  # what Python imports at its start
    assert "NixlConnector" in " ".join(unhindered.command(Path("/python")))


def test_advice_where_vllm_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"(?s)is missing.*benchmarks\.engine --setup"):
        check_python(tmp_path / "python", "benchmarks.engine")
    without = tmp_path / "without"
    without.write_text("#!/bin/sh\nexit 1\n")
    without.chmod(0o755)
    with pytest.raises(SystemExit, match=r"(?s)no vLLM with NIXL.*--setup.*--ours"):
        vllm_release(without, "benchmarks.stale_reads", "\nor --ours")
    with_it = tmp_path / "with"
    with_it.write_text("#!/bin/sh\necho 0.32.0\n")
    with_it.chmod(0o755)
    assert vllm_release(with_it, "benchmarks.stale_reads") == "0.32.0"
