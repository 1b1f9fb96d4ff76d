"""The transport inside a rank of a tensor-parallel worker, driven from the worker's process.

One connection carries commands there (`RankedTransport` sends them) and events back. Both ends are
processes of one worker: what comes through it is trusted.
"""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from disagg.errors import RemoteFault
from disagg.workers.nixl_transport import NixlTransport
from disagg.workers.pool_region import PoolRegion
from disagg.workers.rank_connections import RankAddress, connect_rank
from disagg.workers.transport import rank_name

STATE_S = 0.1
"""A changed state is reported at most so often."""


class RankAgent:
    """A rank's transport; it ends with the connection.

    Args:
        agent_name: of the worker's agents, see `rank_name`.
        rank: counted from 0.
        pool: the rank's part of the KV.
        handle_bytes_max: see `NixlTransport`.
        address: at which the worker's process listens, see `accept_ranks`.

    Raises:
        ConfigError: NIXL does not start; the worker's process has been told.
    """

    def __init__(
        self,
        agent_name: str,
        rank: int,
        pool: PoolRegion,
        handle_bytes_max: int,
        address: RankAddress,
    ) -> None:
        self._connection = connect_rank(address, rank)
        name = rank_name(agent_name, rank)
        self._sending = threading.Lock()  # the transport's thread reports ends as well
        try:
            self._transport = NixlTransport(
                name,
                pool,
                on_read_done=lambda read_id, error: self._send("done", read_id, error),
                handle_bytes_max=handle_bytes_max,
                rank=rank,
            )
        except Exception as error:
            self._send("failed", str(error))
            raise
        (info,) = self._transport.local_pools()
        self._send("pool", info)
        self._sent_state: object = None
        threading.Thread(target=self._serve, name=f"commands of {name}", daemon=True).start()

    def _serve(self) -> None:
        commands: dict[str, Callable[..., None]] = {
            "add_peer": self._transport.add_peer,
            "remove_peer": self._transport.remove_peer,
            "read": self._read,
            "check": self._transport.check,
            "close": self._close,
        }
        try:
            while True:
                if self._connection.poll(STATE_S):
                    name, *arguments = self._connection.recv()
                    with contextlib.suppress(RemoteFault):  # it has failed: the state says so
                        commands[name](*arguments)
                self._send_state()
        except (EOFError, OSError):
            pass  # the worker's process has ended, and this one follows it
        finally:
            self._connection.close()  # so that the worker hears of a bug as well

    def _read(self, read_id: int, peer: str, src_blocks: Any, dst_blocks: Any, parts: Any) -> None:
        try:
            self._transport.read(read_id, peer, src_blocks, dst_blocks, parts)
        except Exception as error:  # nothing was posted
            self._send("done", read_id, str(error))

    def _close(self, timeout_s: float) -> None:
        is_over = self._transport.close(timeout_s)
        self._send_state()
        self._send("closed", is_over)

    def _send_state(self) -> None:
        transport = self._transport
        state = transport.failure, transport.num_in_progress, transport.oldest_in_progress_ms
        if state != self._sent_state:
            self._sent_state = state
            self._send("state", *state)

    def _send(self, *event: object) -> None:
        with self._sending:
            self._connection.send(event)
