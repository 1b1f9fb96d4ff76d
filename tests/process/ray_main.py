"""Program of a test: Ray on this machine, until its input ends; says its address and token."""

import os
import sys
from pathlib import Path

from disagg.cluster.ray_cluster import start_ray, stop_ray
from disagg.cluster.run_folder import RunFolder
from disagg.config import Settings


def main(model_dir: Path) -> int:
    settings = Settings.model_validate({"model": {"dir": str(model_dir)}})
    folder = RunFolder()
    start_ray(settings, folder.path / "ray")
    import ray

    address = ray.get_runtime_context().gcs_address
    print(f"ray {address} {os.environ['RAY_AUTH_TOKEN']}", flush=True)
    try:
        sys.stdin.read()
    finally:
        stop_ray()
        folder.remove()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
