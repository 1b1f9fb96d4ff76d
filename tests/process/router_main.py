"""The real router as a process; says its ports on standard output, ends with standard input."""

import asyncio
import json
import os
import sys
from unittest.mock import patch

from disagg.router.app import RouterApp
from disagg.router.options import RouterOptions
from disagg.router.process import log_as
from disagg.telemetry.garbage_collector import spare_garbage_collector


async def serve(options: RouterOptions) -> None:
    app = RouterApp(options)
    await app.start()
    spare_garbage_collector()  # as a router that is not a test's
    ports = {name: getattr(app, name) for name in ("http_port", "admin_port", "grpc_port")}
    sys.stdout.write("serving " + json.dumps(ports) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await app.stop()


if __name__ == "__main__":
    given = RouterOptions(**json.loads(sys.argv[1]))
    log_as(given)
    # Each life of a router has its own order of workers that are alike; tests say which is taken.
    with patch("disagg.routing.fleet.turn_of", return_value=b""):
        asyncio.run(serve(given))
    os._exit(0)  # the interpreter's own end takes seconds
