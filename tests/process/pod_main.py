"""Program of a test: what a pod holds, Ray and two stand-in workers; runs the pod's preStop hook.

It needs a PID namespace of its own, as the hook ends every worker that it sees.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from disagg.cluster.end_here import find_workers_here
from disagg.cluster.ray_cluster import start_ray, stop_ray
from disagg.cluster.run_folder import RunFolder
from tests.process.lasting_run import settings_of

BOUND_S = 300.0


def run_hook(*options: str) -> None:
    command = [sys.executable, "-m", "disagg.commands", "workers", "--end-here", *options]
    began_s = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BOUND_S)
    said = " ".join((done.stdout + done.stderr).split())
    pids = sorted(one.pid for one in find_workers_here())
    print(f"hook {done.returncode} left {pids} said {said}", flush=True)
    print(f"after {time.monotonic() - began_s:.1f} s", flush=True)


def main(model_dir: Path) -> int:
    folder = RunFolder()
    settings = settings_of(str(model_dir), "", [])
    start_ray(settings, folder.path / "ray")
    from disagg.cluster.supervise import Supervisor

    supervisor = Supervisor(
        settings, print, "tests.process.stand_in_worker:StandInWorker", lasting=True
    )
    try:
        supervisor.start()
        deadline = time.monotonic() + BOUND_S
        while not supervisor.workforce.all_serve and time.monotonic() < deadline:
            supervisor.poll()
        pids = sorted(state.pid for state in supervisor.workforce.states)
        print(f"workers {pids} found {sorted(p.pid for p in find_workers_here())}", flush=True)
        os.kill(pids[0], signal.SIGSTOP)
        run_hook("--set", "worker.drain_timeout_ms=15000", "--set", "cluster.stop_timeout_s=5")
        os.kill(pids[0], signal.SIGCONT)
        run_hook()
    finally:
        stop_ray()
        folder.remove()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
