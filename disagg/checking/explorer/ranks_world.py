"""One lease between workers of several ranks: a READ is as many handles as there are ranks.

Each rank's part of a block lands by itself, and its handle ends by itself. The tables hear of the
READ's end when the last handle is terminal, which is what `PostRead` asks of the shell.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from disagg.checking.explorer.exploration import Step
from disagg.checking.explorer.lease_world import LeaseWorld, Setting, State, View
from disagg.checking.explorer.on_way import Read
from disagg.messages.identity import Incarnation

NUM_RANKS = 2
BETWEEN = " | "


class RankedRead(NamedTuple):
    """A READ of which some handles are not terminal."""

    read_id: int
    owner: Incarnation
    src: int
    dst: int
    landed: tuple[bool, ...] = (False,) * NUM_RANKS
    ended: tuple[bool, ...] = (False,) * NUM_RANKS
    error: str = ""
    reported: bool = False


class RanksWorld(LeaseWorld):
    """The single lease's world, its READs in parts.

    Args:
        setting: what may happen.
        waits_for: handles that must be terminal before a READ counts as ended (all of them; fewer
            in a negative control).
    """

    def __init__(self, setting: Setting, waits_for: int = NUM_RANKS) -> None:
        super().__init__(setting)
        self._waits_for = waits_for

    def _read_steps(
        self, now: State, read: Read, owner: View, reader: View
    ) -> Iterator[Step[State]]:
        ranked = read if isinstance(read, RankedRead) else RankedRead(*read[:4])
        others = now.reads - {read}
        for rank in range(NUM_RANKS):
            if not ranked.ended[rank]:
                yield from self._handle_steps(now, ranked, others, rank, owner, reader)

    def _handle_steps(
        self,
        now: State,
        read: RankedRead,
        others: frozenset[Read],
        rank: int,
        owner: View,
        reader: View,
    ) -> Iterator[Step[State]]:
        name = f"READ {read.read_id}, rank {rank}"
        alive = read.owner == owner.me
        if not read.landed[rank] and alive:
            content = list(now.reader_bytes)
            content[read.dst] = _with_part(content[read.dst], rank, now.owner_bytes[read.src])
            landed = read._replace(landed=_put(read.landed, rank))
            reads: Any = others | {landed}
            after = now._replace(reader_bytes=tuple(content), reads=reads)
            free = read.dst not in reader.held
            broken = f"a READ lands in block {read.dst}, which nobody holds" if free else ""
            label = f"{name} lands: block {read.dst} is now {content[read.dst]!r}"
            yield Step(label, after, broken)
        if read.landed[rank]:
            yield self._handle_ends(now, read, others, rank, "")
        if not alive or now.num_read_errors < self.setting.num_read_errors:
            after = now._replace(num_read_errors=now.num_read_errors + alive)
            yield self._handle_ends(after, read, others, rank, "error")

    def _handle_ends(
        self, now: State, read: RankedRead, others: frozenset[Read], rank: int, error: str
    ) -> Step[State]:
        label = f"READ {read.read_id}, rank {rank} ends: {error or 'DONE'}"
        ended = read._replace(ended=_put(read.ended, rank), error=read.error or error)
        reports = not read.reported and sum(ended.ended) >= self._waits_for
        ended = ended._replace(reported=read.reported or reports)
        reads: Any = others if all(ended.ended) else others | {ended}
        after = now._replace(reads=reads)
        if not reports:
            return Step(label, after)
        return self._reader_does(after, label, "on_read_done", 0, read.read_id, ended.error)


def _put(flags: tuple[bool, ...], rank: int) -> tuple[bool, ...]:
    return (*flags[:rank], True, *flags[rank + 1 :])


def _with_part(content: str, rank: int, part: str) -> str:
    """A block's content after one rank's part of it was overwritten."""
    parts = content.split(BETWEEN) if BETWEEN in content else [content] * NUM_RANKS
    parts[rank] = part
    return part if len(set(parts)) == 1 else BETWEEN.join(parts)
