"""A worker of the older release, see `other_releases`."""

import os

from tests.process.other_releases import become
from tests.process.worker_process import main

if __name__ == "__main__":
    become("older")
    os._exit(main())
