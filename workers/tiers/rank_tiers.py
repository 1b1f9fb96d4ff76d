"""The tiers of one rank of a tensor-parallel worker, driven from the worker's process.

One connection carries commands there (`RankedCopies` sends them) and ends back. Both ends are
processes of one worker: what comes through it is trusted.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial

from disagg.errors import ConfigError
from disagg.workers.pool_region import PoolRegion
from disagg.workers.rank_connections import RankAddress, connect_rank
from disagg.workers.tiers.copies import TierCopies
from disagg.workers.tiers.kinds import open_tiers
from disagg.workers.tiers.known import OpenTiers


class RankTiers:
    """Opens tiers for a rank's part of the pool and copies to and from them.

    It ends with the connection, and with it the connection: the worker hears of a bug as well.

    Args:
        rank: counted from 0.
        pool: the rank's part of the KV.
        address: at which the worker's process listens, see `accept_ranks`.
    """

    def __init__(self, rank: int, pool: PoolRegion, address: RankAddress) -> None:
        self._rank = rank
        self._pool = pool
        self._connection = connect_rank(address, rank)
        threading.Thread(target=self._run, name=f"tiers of rank {rank}", daemon=True).start()

    def _run(self) -> None:
        try:
            settings, contract = self._connection.recv()
            try:
                tiers = open_tiers(settings, contract, self._rank)
            except ConfigError as error:
                self._send("refused", error.message)
                return
            self._send("opened", [(tier.capacity_bytes, tuple(tier.known())) for _, tier in tiers])
            asyncio.run(self._serve(tiers))
        except (EOFError, OSError):
            pass  # the worker's process has ended, and this one follows it
        finally:
            self._connection.close()

    async def _serve(self, tiers: OpenTiers) -> None:
        copies = TierCopies(
            tiers,
            self._pool,
            partial(self._send, "written"),
            partial(self._send, "read"),
            asyncio.get_running_loop(),
            on_cleared=partial(self._send, "cleared"),
        )
        commands: dict[str, Callable[..., None]] = {
            "write": copies.submit_write,
            "read": copies.submit_read,
            "clear": copies.submit_clear,
            "count": lambda: self._send("counts", copies.counts()),
        }
        while True:
            name, *arguments = await asyncio.to_thread(self._connection.recv)
            if name == "close":
                self._send("closed", await asyncio.to_thread(copies.close, *arguments))
                return
            commands[name](*arguments)

    def _send(self, *event: object) -> None:
        """To the worker; one that has ended needs no news."""
        with contextlib.suppress(OSError):
            self._connection.send(event)
