"""Copies between tiers and all ranks of a tensor-parallel worker: one end for all of them."""

import asyncio
import contextlib
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from disagg.errors import ConfigError
from disagg.messages.registration import Contract
from disagg.scheduling.actions import TierKey
from disagg.scheduling.tiers.index import TierSetting
from disagg.scheduling.tiers.rank_ends import RankEnds, known_to_all
from disagg.workers.nixl_transport import START_TIMEOUT_S
from disagg.workers.tiers.copies import OnCleared, OnRead, OnWritten
from disagg.workers.tiers.known import setting_of
from disagg.workers.tiers.options import PARAM, parse_tiers

_log = logging.getLogger(__name__)

COMMANDS_MAX = 1_000
"""Not sent yet to one rank. The core has far fewer copies under way."""
COUNT_S = 1.0
"""Ranks are asked for their counts at most so often."""


def open_on_ranks(
    connections: "Sequence[Connection[Any, Any]]", settings: Sequence[str], contract: Contract
) -> tuple[TierSetting, ...]:
    """Have every rank open its tiers, one after the other: each sees what memory is left.

    Returns:
        The tiers as the core knows them: they have what all ranks have.

    Raises:
        ConfigError: a rank cannot open them.
    """
    opened = []
    for rank, connection in enumerate(connections):
        try:
            connection.send((tuple(settings), contract))
            if not connection.poll(START_TIMEOUT_S):
                raise ConfigError(f"{PARAM}: rank {rank} does not open its tiers", param=PARAM)
            kind, found = connection.recv()
        except (EOFError, OSError):
            raise ConfigError(f"{PARAM}: rank {rank} has ended", param=PARAM) from None
        if kind == "refused":
            raise ConfigError(f"rank {rank}: {found}", param=PARAM)
        opened.append(found)
    return tuple(
        setting_of(
            options,
            min(capacity_bytes for capacity_bytes, _ in of_ranks),
            known_to_all([known for _, known in of_ranks]),
            contract,
        )
        for options, of_ranks in zip(
            parse_tiers(tuple(settings)), zip(*opened, strict=True), strict=True
        )
    )


@dataclass(slots=True)
class _Rank:
    """A rank, and what is to be sent to it."""

    number: int
    connection: "Connection[Any, Any]"
    commands: "queue.Queue[tuple[object, ...]]"
    closed: "Future[bool]" = field(default_factory=Future)
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


class RankedCopies:
    """What `TierCopies` is for a worker of one rank: every rank copies its part of each block.

    A copy has ended when the last rank's has, see `RankEnds`. No rank holds up the loop: each is
    sent to from a thread of its own. A rank that ends takes the worker along.

    Args:
        connections: to the ranks, in their order, after `open_on_ranks`.
        on_written: see `TierCopies`; called on the loop.
        on_read: likewise.
        loop: the control's.
        on_cleared: likewise.
        on_failed: takes why tiers cannot go on; from any thread.
    """

    def __init__(
        self,
        connections: "Sequence[Connection[Any, Any]]",
        on_written: OnWritten,
        on_read: OnRead,
        loop: asyncio.AbstractEventLoop,
        *,
        on_cleared: OnCleared,
        on_failed: Callable[[str], None],
    ) -> None:
        self._on_written = on_written
        self._on_read = on_read
        self._on_cleared = on_cleared
        self._on_failed = on_failed
        self._loop = loop
        self._ends = RankEnds(len(connections))
        self._closed = False
        self._count_due_s = 0.0
        self._ranks = [
            _Rank(number, connection, queue.Queue(COMMANDS_MAX))
            for number, connection in enumerate(connections)
        ]
        for rank in self._ranks:
            for what, run in (("listens to", self._listen), ("tells", self._tell)):
                name = f"{what} tiers of rank {rank.number}"
                threading.Thread(target=run, args=(rank,), name=name, daemon=True).start()

    def submit_write(self, copy_id: int, tier: str, blocks: Sequence[tuple[TierKey, int]]) -> None:
        """See `TierCopies.submit_write`."""
        self._ends.begin_write(copy_id)
        self._tell_all("write", copy_id, tier, tuple(blocks))

    def submit_read(self, copy_id: int, tier: str, blocks: Sequence[tuple[TierKey, int]]) -> None:
        """See `TierCopies.submit_read`."""
        self._ends.begin_read(copy_id, len(blocks))
        self._tell_all("read", copy_id, tier, tuple(blocks))

    def submit_clear(self, tier: str) -> None:
        """See `TierCopies.submit_clear`."""
        self._ends.begin_clear(tier)
        self._tell_all("clear", tier)

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        """See `TierCopies.counts`: those of all ranks together, as they were a moment ago."""
        if self._loop.time() >= self._count_due_s:
            self._count_due_s = self._loop.time() + COUNT_S
            for rank in self._ranks:
                if rank.commands.empty():  # one that stands still is not asked again and again
                    rank.commands.put_nowait(("count",))
        found: dict[str, Counter[str]] = {}
        for rank in self._ranks:
            for tier, counts in rank.counts.items():
                found.setdefault(tier, Counter()).update(counts)
        return found

    def close(self, timeout_s: float) -> bool:
        """See `TierCopies.close`; False too where a rank does not answer."""
        self._closed = True
        self._tell_all("close", timeout_s)
        try:
            return all([rank.closed.result(timeout_s + 1) for rank in self._ranks])
        except TimeoutError:
            return False

    def _tell_all(self, *command: object) -> None:
        for rank in self._ranks:
            try:
                rank.commands.put_nowait(command)
            except queue.Full:
                self._fail(f"rank {rank.number} takes no commands for its tiers")

    def _fail(self, reason: str) -> None:
        if not self._closed:
            self._on_failed(reason)

    # --- on two threads per rank

    def _tell(self, rank: _Rank) -> None:
        with contextlib.suppress(OSError):  # the thread that listens says it
            command: tuple[object, ...] = ()
            while command[:1] != ("close",):
                command = rank.commands.get()
                rank.connection.send(command)

    def _listen(self, rank: _Rank) -> None:
        try:
            while True:
                kind, *values = rank.connection.recv()
                if kind == "closed":
                    rank.closed.set_result(*values)
                else:
                    with contextlib.suppress(RuntimeError):  # a loop that is closed needs no news
                        self._loop.call_soon_threadsafe(self._on_event, rank, kind, values)
        except (EOFError, OSError):
            self._fail(f"the tiers of rank {rank.number} have ended")
        if not rank.closed.done():
            rank.closed.set_result(False)

    # --- on the loop

    def _on_event(self, rank: _Rank, kind: str, values: Sequence[Any]) -> None:
        if self._closed:
            return
        try:
            self._end(rank, kind, *values)
        except Exception as bug:  # one that must not pass for a tier that is slow
            _log.exception("tiers of rank %d", rank.number)
            self._fail(f"tiers of rank {rank.number}: {bug!r}")

    def _end(self, rank: _Rank, kind: str, *values: Any) -> None:
        match kind:
            case "written":
                copy_id = values[0]
                if (written := self._ends.written(rank.number, *values)) is not None:
                    self._on_written(copy_id, *written)
            case "read":
                copy_id = values[0]
                if (intact := self._ends.was_read(rank.number, *values)) is not None:
                    self._on_read(copy_id, intact)
            case "cleared":
                tier = values[0]
                if (error := self._ends.cleared(rank.number, *values)) is not None:
                    self._on_cleared(tier, error)
            case "counts":
                (rank.counts,) = values
