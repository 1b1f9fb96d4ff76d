"""Which transport an engine's pool gets."""

from collections.abc import Callable

from disagg.workers.engines.protocol import Engine
from disagg.workers.nixl_transport import NixlTransport
from disagg.workers.pool_region import PoolRegion
from disagg.workers.ranked_transport import RankedTransport
from disagg.workers.transport import KVTransport


def nixl_transport(
    agent: str, engine: Engine, on_read_done: Callable[[int, str], None], handle_bytes_max: int
) -> KVTransport:
    """The transport of every real worker: one agent, or one per rank.

    Args:
        agent: name of the agent, or of all of them together.
        engine: whose pool is read.
        on_read_done: takes a READ's number and its error, "" if it ended well, on any thread.
        handle_bytes_max: of a READ, in one handle.
    """
    pool = engine.region
    if isinstance(pool, PoolRegion):
        return NixlTransport(
            agent, pool, on_read_done=on_read_done, handle_bytes_max=handle_bytes_max
        )
    connections = pool.connect(agent, handle_bytes_max)
    return RankedTransport(connections, on_read_done=on_read_done)
