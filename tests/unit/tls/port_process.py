"""``python -m tests.unit.tls.port_process DIRECTORY``: a port with certificates; prints it."""

import asyncio
import sys

from disagg.tls.connections import Connections


async def _serve(directory: str) -> None:
    own = Connections(directory)
    server = own.server()
    port = own.listen(server, "127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
