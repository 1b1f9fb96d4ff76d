"""Program of a test: a supervisor of lasting stand-in workers, until its input ends.

Arguments: model folder, address of the Ray cluster, then settings as section.key=value. With the
word asks-nobody before these it does not ask whether another supervisor is in charge.
"""

import sys
import threading
from pathlib import Path

from disagg.cluster.ray_cluster import join_ray, stop_ray
from disagg.config import Settings
from disagg.config.sources import Given, parse_text, read_settings
from disagg.errors import DisaggError

ASKS_NOBODY = "asks-nobody"
STAND_IN = "tests.process.stand_in_worker:StandInWorker"


def settings_of(model_dir: str, address: str, changes: list[str]) -> Settings:
    values = {"model.dir": model_dir, "cluster.ray_address": address, "cluster.hash_key": "ab" * 32}
    given = {key: Given(value, "test") for key, value in values.items()}
    for change in changes:
        key, _, value = change.partition("=")
        given[key] = Given(parse_text(key, value), "test")
    return read_settings(None, {}, given).settings


def main(model_dir: Path, address: str, *changes: str) -> int:
    settings = settings_of(str(model_dir), address, [one for one in changes if one != ASKS_NOBODY])
    done = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        done.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    join_ray(settings.cluster.ray_address, settings.cluster.join_timeout_s)
    from disagg.cluster.lasting import LastingSupervision
    from disagg.cluster.supervise import Supervisor

    def report(line: str) -> None:
        print(line, flush=True)

    supervision = LastingSupervision(settings, report, STAND_IN)

    def see() -> None:
        if done.is_set():
            raise KeyboardInterrupt

    try:
        if ASKS_NOBODY in changes:
            supervisor = Supervisor(settings, report, STAND_IN, lasting=True)
            supervisor.start()
            while not done.is_set():
                supervisor.poll()
            return 0
        supervision.run(see, lambda _: None)
    except KeyboardInterrupt:
        return 0
    except DisaggError as error:
        print(f"{type(error).__name__}: {error.message}", flush=True)
        return 2
    finally:
        supervision.end()
        stop_ray()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
