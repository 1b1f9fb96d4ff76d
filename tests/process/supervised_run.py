"""Program of the supervisor's test: Ray and stand-in workers until standard input ends."""

import os
import sys
import threading
from pathlib import Path

from disagg.cluster.hash_key import new_secret
from disagg.cluster.ray_cluster import start_ray, stop_ray
from disagg.cluster.run_folder import RunFolder
from disagg.config import Settings
from disagg.errors import DisaggError


def main(model_dir: Path) -> int:
    cluster = {"stop_timeout_s": 5.0, "hash_key": new_secret()}
    given = {"model": {"dir": str(model_dir)}, "cluster": cluster}
    settings = Settings.model_validate(given)
    done = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        done.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    folder = RunFolder()
    start_ray(settings, folder.path / "ray")
    import ray

    from disagg.cluster.supervise import Supervisor

    address = ray.get_runtime_context().gcs_address
    print(f"ray {address} {os.environ['RAY_AUTH_TOKEN']}", flush=True)
    supervisor = Supervisor(
        settings,
        lambda line: print(line, flush=True),
        "tests.process.stand_in_worker:StandInWorker",
    )
    try:
        supervisor.start()
        supervisor.wait()
        print("all serve", flush=True)
        while not done.is_set():
            supervisor.poll()
    except DisaggError as error:
        print(f"{type(error).__name__}: {error.message}", flush=True)
        return 2
    finally:
        supervisor.stop()
        stop_ray()
        folder.remove()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
