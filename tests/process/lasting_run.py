"""Program of a test: a supervisor of lasting stand-in workers, until its input ends.

Arguments: model folder, address of the Ray cluster, then settings as section.key=value.
"""

import sys
import threading
from pathlib import Path

from disagg.cluster.ray_cluster import join_ray, stop_ray
from disagg.config import Settings
from disagg.config.sources import Given, parse_text, read_settings
from disagg.errors import DisaggError


def settings_of(model_dir: str, address: str, changes: list[str]) -> Settings:
    values = {"model.dir": model_dir, "cluster.ray_address": address, "cluster.hash_key": "ab" * 32}
    given = {key: Given(value, "test") for key, value in values.items()}
    for change in changes:
        key, _, value = change.partition("=")
        given[key] = Given(parse_text(key, value), "test")
    return read_settings(None, {}, given).settings


def main(model_dir: Path, address: str, *changes: str) -> int:
    settings = settings_of(str(model_dir), address, list(changes))
    done = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        done.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    join_ray(settings)
    from disagg.cluster.supervise import Supervisor

    supervisor = Supervisor(
        settings,
        lambda line: print(line, flush=True),
        "tests.process.stand_in_worker:StandInWorker",
        lasting=True,
    )
    try:
        supervisor.start()
        while not done.is_set():
            supervisor.poll()
    except DisaggError as error:
        print(f"{type(error).__name__}: {error.message}", flush=True)
        return 2
    finally:
        stop_ray()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
