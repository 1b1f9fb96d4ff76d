"""What is started: a router alone, a router as it was, a whole machine, a command."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from benchmarks.servers.program import START_S, Program, free_port
from benchmarks.start.process_figures import Taken, in_sum, taken_by

POLL_S = 0.02
WITH_TORCH = "import torch, sys; from disagg.commands.main import main; sys.argv[0] = 'd'; main()"
"""The router in a process that has torch: as it was when transformers imported that."""
WORKER = re.compile(r"worker (\S+) serves on \S+ +\(pid (\d+), epoch")
WAYS = {"ours": ("-m", "disagg.commands"), "with torch": ("-c", WITH_TORCH)}


def start_router(way: str, checkpoint: Path, folder: Path) -> Taken:
    """Start a router by one of `WAYS` until it answers, and end it."""
    port = free_port()
    ports = ["--http-port", str(port), "--grpc-port", "0", "--set", "router.admin_port=0"]
    command = [sys.executable, *WAYS[way], "router", "--model", str(checkpoint), *ports]
    environment = {
        "DISAGG_CLUSTER__HASH_KEY": "a secret for as long as this takes",
        "DISAGG_CLUSTER__ALLOW_INSECURE": "true",
    }
    log = folder / f"router {way}.log"
    program = Program(command, environment, log, f"http://127.0.0.1:{port}")
    try:
        _wait(program, log, lambda: _answers(program.url, "/health"))
        (process,) = program.processes()
        return taken_by(process.pid)
    finally:
        program.end()


def start_machine(checkpoint: Path, folder: Path) -> dict[str, Taken]:
    """``disagg serve`` with a prefill and a decode worker: each process once it serves, idle."""
    port = free_port()
    settings = ("worker.device=cpu", "worker.num_blocks=64", "worker.num_threads=1")
    given = [part for setting in (*settings, "router.admin_port=0") for part in ("--set", setting)]
    command = [sys.executable, "-m", "disagg.commands", "serve", "--model", str(checkpoint)]
    command += ["--http-port", str(port), "--grpc-port", "0", *given]
    log = folder / "serve.log"
    program = Program(command, {}, log, f"http://127.0.0.1:{port}")
    found: dict[str, Taken] = {}

    def all_serve() -> bool:
        for worker_id, pid in WORKER.findall(log.read_text()):
            if worker_id not in found:
                found[worker_id] = taken_by(int(pid))
        return len(found) == 2 and _answers(program.url, "/ready")

    try:
        _wait(program, log, all_serve)
        pids = {int(pid) for _, pid in WORKER.findall(log.read_text())}
        others = []
        for process in program.processes():
            arguments = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")
            if "disagg.commands" in arguments:
                found["router" if "router" in arguments else "serve"] = taken_by(process.pid)
            elif process.pid not in pids:
                others.append(taken_by(process.pid))
        return found | {"Ray": in_sum(others)}
    finally:
        program.end()


def run_command(*arguments: str) -> Taken:
    """``disagg ARGUMENTS`` to its end; of its memory nothing is known then."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "disagg.commands", *arguments], stdout=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"disagg {arguments} ended with exit code {process.returncode}")
    wall_s = time.monotonic() - began
    return Taken(wall_s, used.ru_utime + used.ru_stime, 0.0, 0.0)


def _answers(url: str, path: str) -> bool:
    try:
        return httpx.get(url + path, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def _wait(program: Program, log: Path, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not holds():
        if not program.processes() or time.monotonic() > deadline:
            raise RuntimeError(f"{log.name}:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(POLL_S)
