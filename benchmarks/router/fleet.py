"""What a fleet's reports take of a router: ``python -m benchmarks.router.fleet``.

10 to 1,000 workers without engines register with ``disagg router``, each with a session of its own,
and send stats and KV events as real ones do: idle ones say nothing new, busy ones have other stats
whenever they are looked at, ten times a second, and some of their blocks change with every step, 20
times a second. Nobody asks for anything: what it shows is how much of a core
(user and system, all threads) is left for requests. Beside it the same, where the router asks for
no pace. Target: a fleet takes a quarter of a core. Busy ones are 300 at most. ``--quick``: 100.
"""

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import httpx

from benchmarks.router.checkpoint import make_checkpoint
from benchmarks.router.environment import start_ours
from benchmarks.servers.program import Program, free_port
from benchmarks.transfer.figures import load

SHARE_MAX = 0.25
OF_A_PROCESS = 250
"""Workers of one process."""
BUSY_MAX = 300
"""More of them take what the router should have of a small machine."""
SETTLED_S, MEASURED_S = 5.0, 10.0


def share_of(num_workers: int, *, busy: bool, paced: bool) -> float:
    """Of a core, what the router takes while this fleet is there."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, port = Path(name), free_port()
        router = start_ours(
            make_checkpoint(folder / "checkpoint"),
            port,
            folder / "router.log",
            worker_silent_ms=10_000,
        )
        stack.callback(router.end)
        router.wait_ready()
        for first in range(0, num_workers, OF_A_PROCESS):
            given = {
                "router": f"127.0.0.1:{port}",
                "first": first,
                "num": min(OF_A_PROCESS, num_workers - first),
                "busy": busy,
                "paced": paced,
            }
            command = [sys.executable, "-m", "benchmarks.router.fleet_workers", json.dumps(given)]
            workers = Program(command, {}, folder / f"workers-{first}.log", "")
            stack.callback(workers.end)
        router.wait_until(lambda: num_ready(router.url) == num_workers)
        time.sleep(SETTLED_S)
        before_s, began_s = router.cpu_s(), time.monotonic()
        time.sleep(MEASURED_S)
        share = (router.cpu_s() - before_s) / (time.monotonic() - began_s)
        assert num_ready(router.url) == num_workers, "some were taken for lost"
        return share


def num_ready(url: str) -> int:
    """Workers that take requests, as the router has it."""
    return int(httpx.get(f"{url}/health", timeout=30).json()["num_workers_ready"])


def print_share(name: str, ours: float, peer: float, peer_name: str) -> bool:
    """Print shares of a core; returns whether ours is small enough."""
    line = {
        "name": name,
        "ours": round(ours, 4),
        "peer": round(peer, 4),
        "unit": "cores",
        "ratio": round(SHARE_MAX / ours, 2),
        "target": 1.0,
        "ok": ours <= SHARE_MAX,
        "peer_name": peer_name,
        "note": f"ratio: a quarter of a core / ours; {load()}",
    }
    print(json.dumps(line), flush=True)
    return ours <= SHARE_MAX


def main() -> int:
    """Run all cases; 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="up to 100 workers")
    reached = True
    for num_workers in (10, 100) if parser.parse_args().quick else (10, 100, 300, 1_000):
        for busy in (False, True):
            if busy and num_workers > BUSY_MAX:
                continue
            ours, own_pace = (
                share_of(num_workers, busy=busy, paced=paced) for paced in (True, False)
            )
            name = f"{num_workers} {'busy' if busy else 'idle'} workers"
            reached &= print_share(name, ours, own_pace, "workers at their own pace")
    return 0 if reached else 1


if __name__ == "__main__":
    raise SystemExit(main())
