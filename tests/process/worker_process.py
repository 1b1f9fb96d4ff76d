"""A real worker's process, signals and all; without Ray around it."""

import json
import os
import sys

from disagg.workers.options import WorkerOptions
from disagg.workers.signals import drain_on_signals
from disagg.workers.worker import Worker


def main() -> int:
    options = json.loads(sys.argv[1])
    options["router_addresses"] = tuple(options["router_addresses"])
    worker = Worker(WorkerOptions(**options))
    worker.start()
    drain_on_signals(worker)
    said = {"address": worker.address, "epoch": worker.incarnation.epoch}
    sys.stdout.write("serving " + json.dumps(said) + "\n")
    sys.stdout.flush()
    worker.wait_failed()
    return 1 if worker.failed else 0


if __name__ == "__main__":
    os._exit(main())
