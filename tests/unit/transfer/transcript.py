"""Plays a script of commands on an owner and a reader and writes down everything said.

A transcript is blocks of a command, a line ``----`` and what it caused. Messages queue up in
both directions until a command delivers, repeats, turns round or loses them.
"""

from collections.abc import Sequence
from dataclasses import fields

from disagg.messages.identity import Attempt, Incarnation
from disagg.messages.peer import (
    AskOffers,
    Commit,
    CommitAnswer,
    CommitSeen,
    OfferedRange,
    Offers,
    PeerMessage,
    Seal,
)
from disagg.transfer.actions import InboundCommitted, PostRead, Send
from tests.unit.transfer.two_workers import KEY, OWNER, READER, Owner, Reader


class Play:
    """One owner and one reader; `command` returns the lines it caused."""

    def __init__(self) -> None:
        self.owner, self.reader = Owner(), Reader()
        self.queue: list[tuple[Incarnation, PeerMessage]] = []
        self.now_ms = 0
        self.lease = 0

    def command(self, line: str) -> list[str]:
        """Carry out one command."""
        name, *args = line.split()
        method = getattr(self, f"do_{name}")
        return method(*args) or ["(nothing)"]

    def do_begin(self) -> list[str]:
        self.reader.begin()
        return [f"holds {self.reader.free - self.reader.pool.num_free} blocks"]

    def do_open(self) -> list[str]:
        self.lease = self.owner.table.open(self.now_ms, KEY, READER, self.owner.news)
        return [f"lease {self.lease}"]

    def do_offer(self, *pairs: str) -> list[str]:
        return self._owner(self.owner.table.offer(self.now_ms, self.lease, self._blocks(pairs)))

    def do_seal(self, *pairs: str) -> list[str]:
        return self._owner(self.owner.table.seal(self.now_ms, self.lease, self._blocks(pairs), 8))

    def do_request_ends(self) -> list[str]:
        self.owner.let_request_go()
        return self.do_holds()

    def do_end(self, reason: str) -> list[str]:
        return self._owner(self.owner.table.end_key(KEY, reason))

    def do_abort(self) -> list[str]:
        return self._reader(self.reader.table.abort(KEY))

    def do_done(self, read_id: str, error: str = "") -> list[str]:
        return self._reader(self.reader.table.on_read_done(self.now_ms, int(read_id), error))

    def do_wait(self, duration_ms: str) -> list[str]:
        self.now_ms += int(duration_ms)
        lines = self._owner(self.owner.table.expire(self.now_ms))
        return lines + self._reader(self.reader.table.tick(self.now_ms))

    def do_deliver(self, index: str = "0") -> list[str]:
        return self._arrive(*self.queue.pop(int(index)))

    def do_repeat(self, index: str = "0") -> list[str]:
        return self._arrive(*self.queue[int(index)])

    def do_lose(self, index: str = "0") -> list[str]:
        _, message = self.queue.pop(int(index))
        return [f"lost: {show(message)}"]

    def do_holds(self) -> list[str]:
        owner, reader = self.owner, self.reader
        return [
            f"owner {owner.free - owner.pool.num_free}, reader {reader.free - reader.pool.num_free}"
        ]

    def _arrive(self, sender: Incarnation, message: PeerMessage) -> list[str]:
        match message:
            case Offers():
                actions = self.reader.table.on_offers(self.now_ms, sender, message)
            case CommitAnswer():
                actions = self.reader.table.on_commit_answer(self.now_ms, sender, message)
            case AskOffers():
                return self._owner(self.owner.table.on_ask(sender, message))
            case Commit():
                return self._owner(self.owner.table.on_commit(sender, message))
            case CommitSeen():
                self.owner.table.on_seen(sender, message)
                return []
            case _:
                raise AssertionError(f"nobody sends {message}")
        return self._reader(actions)

    def _owner(self, actions: Sequence[object]) -> list[str]:
        return self._note(OWNER, "owner", actions)

    def _reader(self, actions: Sequence[object]) -> list[str]:
        lines = self._note(READER, "reader", actions)
        if any(isinstance(action, InboundCommitted) for action in actions):
            self.reader.table.finish(KEY)
        return lines

    def _note(self, me: Incarnation, name: str, actions: Sequence[object]) -> list[str]:
        lines = []
        for action in actions:
            if isinstance(action, Send):
                self.queue.append((me, action.message))
                lines.append(f"{name} sends {show(action.message)}")
            else:
                lines.append(f"{name}: {show(action)}")
        return lines

    def _blocks(self, pairs: Sequence[str]) -> list[list[tuple[int, int]]]:
        groups: list[list[tuple[int, int]]] = [[], []]
        for pair in pairs:
            group, block_index, index = map(int, pair.replace("=", ":").split(":"))
            groups[group].append((block_index, self.owner.blocks[index]))
        return groups


def show(thing: object) -> str:
    """Compact and complete, but for the key, which is always the same."""
    match thing:
        case OfferedRange(group, block_index, block_id, num_blocks):
            return f"{group}:{block_index}={block_id}x{num_blocks}"
        case Seal():
            return f"seal{thing.num_ranges}"
        case Attempt():
            return f"{thing.reader_epoch}#{thing.number}"
        case PostRead():
            return f"READ {thing.read_id} {thing.src_blocks} -> {thing.dst_blocks}"
        case tuple():
            return "[" + " ".join(map(show, thing)) + "]"
    if not hasattr(thing, "__dataclass_fields__"):
        return str(thing)
    shown = ((f.name, getattr(thing, f.name)) for f in fields(thing) if f.name != "key")  # type: ignore[arg-type]
    said = [f"{name}={show(value)}" for name, value in shown if value not in (None, False, "", -1)]
    return " ".join([type(thing).__name__, *said])
