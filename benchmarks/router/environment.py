"""The peers' environment, and how each router is started."""

import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from benchmarks.servers.program import Program, free_port
from disagg.testing.scripted_worker import HASH_KEY

PEERS = ("vllm-router==0.1.17", "sglang-router==0.3.2")
OURS = "disagg"
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".cache" / "bench-router"
BIN = ENVIRONMENT / "bin"
MODEL = "tiny"


def set_up() -> None:
    """Create the peers' environment (200 MB, a minute); what is there already is kept."""
    if not (BIN / "python").exists():
        venv.create(ENVIRONMENT, with_pip=True)
    pip = [str(BIN / "python"), "-m", "pip", "install", "--disable-pip-version-check", *PEERS]
    if subprocess.run(pip).returncode:
        sys.exit("pip has failed; its message is above. Is PyPI reachable?")


def check_peers(names: Sequence[str]) -> None:
    """End the program, with advice, where a peer is not installed."""
    for name in names:
        if name != OURS and not (BIN / name).exists():
            sys.exit(f"{BIN / name} is missing: python -m benchmarks.router --setup")


def start_ours(
    checkpoint: Path,
    grpc_port: int,
    log: Path,
    *,
    num_processes: int = 1,
    worker_silent_ms: int = 600_000,  # workers here send no heartbeats
) -> Program:
    """``disagg router`` with its defaults; workers register at the gRPC port."""
    port = free_port()
    settings = (
        f"router.http_port={port}",
        f"router.grpc_port={grpc_port}",
        "router.admin_port=0",
        f"model.name={MODEL}",
        f"router.worker_silent_ms={worker_silent_ms}",
        f"router.processes={num_processes}",
    )
    given = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "disagg.commands", "router", "--model", str(checkpoint)]
    environment = {
        "DISAGG_CLUSTER__HASH_KEY": HASH_KEY,
        "DISAGG_CLUSTER__ALLOW_INSECURE": "true",
    }
    return Program([*command, *given], environment, log, f"http://127.0.0.1:{port}")


def start_peer(name: str, worker_urls: Sequence[str], log: Path) -> Program:
    """A peer that takes turns between workers, as plain as it can be set."""
    port = free_port()
    command = [str(BIN / name), *(["launch"] if name == "sglang-router" else [])]
    command += ["--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
    command += ["--prometheus-port", str(free_port()), "--worker-urls", *worker_urls]
    return Program(command, {}, log, f"http://127.0.0.1:{port}")
