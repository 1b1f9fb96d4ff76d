"""The real router's process, signals and all; its ports are given."""

import json
import os
import sys

from disagg.router.app import run
from disagg.router.options import RouterOptions

if __name__ == "__main__":
    code = run(RouterOptions(**json.loads(sys.argv[1])))
    os._exit(code)  # the interpreter's own end takes seconds
