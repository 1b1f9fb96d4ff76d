"""The real router's process, signals and all; its ports are given."""

import json
import os
import sys

from disagg.router.options import RouterOptions
from disagg.router.process import run

if __name__ == "__main__":
    code = run(RouterOptions(**json.loads(sys.argv[1])))
    os._exit(code)  # the interpreter's own end takes seconds
