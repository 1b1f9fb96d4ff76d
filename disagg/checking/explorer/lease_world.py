"""A small world for the explorer: one generation, one owner, one reader, a hostile network.

The lease and inbound tables are the production objects. The bytes of a block are modelled as what
was last written into it; a free block of the owner is overwritten at once, which is the worst
moment. A READ is as many handles as there are ranks: each rank's part of a block lands by itself,
and its handle ends by itself; the tables hear of the READ's end when the last handle is terminal,
which is what `PostRead` asks of the shell. Once sent, a message may arrive at any later time, any
number of times or never (loss, duplication and reordering in one); with ``lossy`` it arrives at
most once, which is what the repetitions are for.
"""

import io
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from disagg.checking.explorer.exploration import Exploration, Goal, Step, explore
from disagg.checking.explorer.holds import Holds
from disagg.checking.explorer.memory import NOTHING, OTHER
from disagg.checking.explorer.state import Envelope, put
from disagg.checking.explorer.table_news import NEWS
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import AskOffers, Commit, CommitAnswer, CommitSeen, Offers
from disagg.transfer.actions import InboundCommitted, InboundPartial, PostRead, Send
from disagg.transfer.owner.table import LeaseTable
from disagg.transfer.reader.table import InboundTable

KEY = RequestKey("r", 0)
NUM_BLOCKS = 2
BETWEEN = " | "


def right(position: int) -> str:
    """What the block at a position must contain."""
    return f"KV {position}"


@dataclass(frozen=True)
class LeaseSetting:
    """What may happen, how often, and the objects under test (mutants in negative controls)."""

    leases: type[LeaseTable] = LeaseTable
    inbound: type[InboundTable] = InboundTable
    num_leases: int = 1
    num_inbound: int = 1
    num_reader_restarts: int = 0
    num_owner_restarts: int = 0
    num_read_errors: int = 0
    ends: bool = True
    """The owner may end leases, the reader may abort."""
    repeats: bool = True
    """The reader repeats Commit and AskOffers."""
    stuck: bool = False
    lossy: bool = False
    checks_addressee: bool = True
    committed_max: int = 2
    num_ranks: int = 1
    waits_for: int | None = None
    """Handles that must be terminal before a READ counts as ended: all, but in a control."""


class Read(NamedTuple):
    """A READ of which some handles are not terminal."""

    read_id: int
    owner: Incarnation
    src: int
    dst: int
    landed: tuple[bool, ...]
    ended: tuple[bool, ...]
    error: str = ""
    reported: bool = False


class State(NamedTuple):
    """Everything that can differ between two moments; the tables are pickled."""

    leases: bytes
    inbound: bytes
    owner_bytes: tuple[str, ...] = (NOTHING,) * NUM_BLOCKS
    reader_bytes: tuple[str, ...] = (NOTHING,) * NUM_BLOCKS
    on_way: frozenset[int] = frozenset()
    reads: frozenset[Read] = frozenset()
    placed: tuple[int, ...] = ()
    """The owner's block per position, held by the prefill until it is sealed."""
    lease_id: int = 0
    num_offered: int = 0
    num_leases: int = 0
    num_inbound: int = 0
    num_reader_restarts: int = 0
    num_owner_restarts: int = 0
    num_read_errors: int = 0
    num_valid: int = 0


class View(NamedTuple):
    """What the world needs to know of a table."""

    me: Incarnation
    num_live: int
    held: frozenset[int]
    may_stick: bool


class LeaseWorld:
    """All steps of the world under one setting."""

    def __init__(self, setting: LeaseSetting) -> None:
        self.setting = setting
        self._messages: list[Envelope] = []
        self._shown: list[str] = []
        self._index: dict[Envelope, int] = {}
        # The tables take few states of their own, so each of their moves is made only once.
        self._moves: dict[tuple[object, ...], tuple[bytes, Sequence[object], object]] = {}
        self._views: dict[bytes, View] = {}

    def explore(self, states_max: int = 400_000) -> Exploration:
        """Visit everything; goals are the states without holds (lossy: with a valid transfer)."""
        start = State(self._new_leases(0), self._new_inbound(0))
        goal = Goal("good end", self._is_goal)
        return explore(start, self.steps, goals=(goal,), states_max=states_max)

    def steps(self, now: State) -> Iterator[Step[State]]:
        """Everything that can happen next."""
        owner, reader = self._views[now.leases], self._views[now.inbound]
        yield from self._owner_steps(now, owner, reader)
        yield from self._reader_steps(now, owner, reader)
        for index in sorted(now.on_way):
            envelope = self._messages[index]
            me = reader.me if isinstance(envelope.message, Offers | CommitAnswer) else owner.me
            if envelope.to == me or not self.setting.checks_addressee:
                yield self._arrive(now, index)
            if self.setting.lossy:
                gone = now._replace(on_way=now.on_way - {index})
                yield Step(f"lost: {self._shown[index]}", gone)
        for read in sorted(now.reads, key=lambda read: read.read_id):
            for rank in range(self.setting.num_ranks):
                if not read.ended[rank]:
                    yield from self._handle_steps(now, read, rank, owner, reader)

    def _is_goal(self, state: State) -> bool:
        if self.setting.lossy:
            return state.num_valid > 0
        held = self._views[state.leases].held | self._views[state.inbound].held
        return not held and not state.placed

    # -- the owner ----------------------------------------------------------------------------

    def _owner_steps(self, now: State, owner: View, reader: View) -> Iterator[Step[State]]:
        # A lease is opened on the reader's yes, which comes with the begin of its transfer; a
        # restarted owner may have got the yes of a transfer that is not modelled.
        wanted = min(self.setting.num_leases, now.num_inbound + now.num_owner_restarts)
        if now.num_leases < wanted and not owner.num_live:
            label = f"owner prefills, opens lease {now.num_leases + 1}"
            yield Step(label, self._open(now, reader))
        if owner.num_live and now.num_offered < NUM_BLOCKS:
            yield self._offer(now)
        if owner.num_live and self.setting.ends:
            yield self._owner_does(now, "owner ends the lease", "expire", 1)
        if now.num_reader_restarts:
            old = Incarnation("reader", "R0")
            yield self._owner_does(now, "owner notices the restart", "on_peer_lost", 0, old)
        if now.num_owner_restarts < self.setting.num_owner_restarts:
            life = now.num_owner_restarts + 1
            fresh = now._replace(
                leases=self._new_leases(life),
                owner_bytes=(NOTHING,) * NUM_BLOCKS,
                placed=(),
                lease_id=0,
                num_owner_restarts=life,
            )
            yield Step("owner restarts", fresh)

    def _open(self, now: State, reader: View) -> State:
        # Every second prefill gets its blocks in the other order: old block ids, other bytes.
        placed = tuple(range(NUM_BLOCKS))[:: -1 if now.num_leases % 2 else 1]
        leases, _, lease_id = self._move(now.leases, "open", 0, KEY, reader.me, NEWS)
        assert isinstance(lease_id, int)
        return now._replace(
            leases=leases,
            lease_id=lease_id,
            owner_bytes=tuple(right(placed.index(block)) for block in range(NUM_BLOCKS)),
            placed=placed,
            num_offered=0,
            num_leases=now.num_leases + 1,
        )

    def _offer(self, now: State) -> Step[State]:
        position = now.num_offered
        after = now._replace(num_offered=position + 1)
        blocks = (((position, now.placed[position]),),)
        if position + 1 < NUM_BLOCKS:
            label = f"owner offers position {position}"
            return self._owner_does(after, label, "offer", 0, now.lease_id, blocks)
        label = f"owner offers position {position} and seals"
        return self._owner_does(after, label, "seal", 0, now.lease_id, blocks, 8)

    def _owner_does(self, now: State, label: str, method: str, *args: object) -> Step[State]:
        leases, actions, _ = self._move(now.leases, method, *args)
        view = self._views[leases]
        on_way = self._send(now.on_way, view.me, actions)
        prefilling = view.num_live and now.num_offered < NUM_BLOCKS
        placed = now.placed if prefilling else ()
        content = tuple(
            old if block in view.held or block in placed else OTHER
            for block, old in enumerate(now.owner_bytes)
        )
        after = now._replace(leases=leases, on_way=on_way, placed=placed, owner_bytes=content)
        return Step(label, after)

    # -- the reader ---------------------------------------------------------------------------

    def _reader_steps(self, now: State, owner: View, reader: View) -> Iterator[Step[State]]:
        more = now.num_inbound < self.setting.num_inbound
        if more and not reader.num_live and not reader.held:
            after = now._replace(
                reader_bytes=(NOTHING,) * NUM_BLOCKS, num_inbound=now.num_inbound + 1
            )
            label = f"reader begins inbound transfer {after.num_inbound}"
            destinations = (tuple((block, block) for block in range(NUM_BLOCKS)),)
            yield self._reader_does(after, label, "begin", 0, KEY, owner.me, destinations, NEWS)
        if reader.num_live and self.setting.repeats:
            yield self._reader_does(now, "reader repeats", "tick", 0)
        if reader.num_live and self.setting.ends:
            yield self._reader_does(now, "reader aborts", "abort", KEY)
        if reader.num_live and now.num_owner_restarts:
            old = Incarnation("owner", "O0")
            yield self._reader_does(now, "reader notices the restart", "on_peer_lost", 0, old)
        if self.setting.stuck and reader.may_stick:
            yield self._reader_does(now, "reader finds READs stuck", "tick", 1)
        if now.num_reader_restarts < self.setting.num_reader_restarts:
            life = now.num_reader_restarts + 1
            fresh = now._replace(
                inbound=self._new_inbound(life),
                reader_bytes=(NOTHING,) * NUM_BLOCKS,
                reads=frozenset(),  # The end of the process ends its READs.
                num_reader_restarts=life,
            )
            yield Step("reader restarts", fresh)

    def _handle_steps(
        self, now: State, read: Read, rank: int, owner: View, reader: View
    ) -> Iterator[Step[State]]:
        which = f", rank {rank}" if self.setting.num_ranks > 1 else ""
        name, others = f"READ {read.read_id}{which}", now.reads - {read}
        alive = read.owner == owner.me
        if not read.landed[rank] and alive:
            content = list(now.reader_bytes)
            content[read.dst] = self._with_part(content[read.dst], rank, now.owner_bytes[read.src])
            landed = others | {read._replace(landed=put(read.landed, rank, True))}
            after = now._replace(reader_bytes=tuple(content), reads=landed)
            free = read.dst not in reader.held
            broken = f"a READ lands in block {read.dst}, which nobody holds" if free else ""
            label = f"{name} lands: block {read.dst} is now {content[read.dst]!r}"
            yield Step(label, after, broken)
        if read.landed[rank]:
            yield self._handle_ends(now, name, read, rank, "")
        if not alive or now.num_read_errors < self.setting.num_read_errors:
            after = now._replace(num_read_errors=now.num_read_errors + alive)
            yield self._handle_ends(after, name, read, rank, "error")

    def _handle_ends(self, now: State, name: str, read: Read, rank: int, error: str) -> Step[State]:
        ended = read._replace(ended=put(read.ended, rank, True), error=read.error or error)
        waits_for = self.setting.waits_for or self.setting.num_ranks
        reports = not read.reported and sum(ended.ended) >= waits_for
        ended = ended._replace(reported=read.reported or reports)
        others = now.reads - {read}
        after = now._replace(reads=others if all(ended.ended) else others | {ended})
        label = f"{name} ends with an error" if error else f"{name} is DONE"
        if not reports:
            return Step(label, after)
        return self._reader_does(after, label, "on_read_done", 0, read.read_id, ended.error)

    def _with_part(self, content: str, rank: int, part: str) -> str:
        """A block's content after one rank's part of it was overwritten."""
        num_ranks = self.setting.num_ranks
        parts = content.split(BETWEEN) if BETWEEN in content else [content] * num_ranks
        parts[rank] = part
        return part if len(set(parts)) == 1 else BETWEEN.join(parts)

    def _reader_does(self, now: State, label: str, method: str, *args: object) -> Step[State]:
        inbound, actions, _ = self._move(now.inbound, method, *args)
        on_way = self._send(now.on_way, self._views[inbound].me, actions)
        reads, num_valid, broken = set(now.reads), now.num_valid, ""
        for action in actions:
            match action:
                case PostRead(read_id, _, owner, (src,), (dst,)):
                    none = (False,) * self.setting.num_ranks
                    reads.add(Read(read_id, owner, src, dst, none, none))
                case InboundCommitted():
                    if now.reader_bytes != tuple(map(right, range(NUM_BLOCKS))):
                        broken = f"valid with wrong bytes: {list(now.reader_bytes)}"
                    num_valid = 1
                    inbound, _, _ = self._move(inbound, "finish", KEY)
                case InboundPartial(_, failed):
                    intact = [p for p in range(NUM_BLOCKS) if (0, p) not in failed]
                    if any(now.reader_bytes[p] != right(p) for p in intact):
                        broken = f"valid with wrong bytes: {list(now.reader_bytes)}"
                    inbound, _, _ = self._move(inbound, "finish", KEY)
        after = now._replace(
            inbound=inbound, on_way=on_way, reads=frozenset(reads), num_valid=num_valid
        )
        return Step(label, after, broken)

    # -- messages and tables ------------------------------------------------------------------

    def _arrive(self, now: State, index: int) -> Step[State]:
        sender, _, message = self._messages[index]
        label = f"arrives: {self._shown[index]}"
        if self.setting.lossy:
            now = now._replace(on_way=now.on_way - {index})
        match message:
            case Offers():
                return self._reader_does(now, label, "on_offers", 0, sender, message)
            case CommitAnswer():
                return self._reader_does(now, label, "on_commit_answer", 0, sender, message)
            case AskOffers():
                return self._owner_does(now, label, "on_ask", sender, message)
            case Commit():
                return self._owner_does(now, label, "on_commit", sender, message)
            case CommitSeen():
                return self._owner_does(now, label, "on_seen", sender, message)
            case _:
                raise AssertionError(f"nobody sends {message}")

    def _send(
        self, on_way: frozenset[int], sender: Incarnation, actions: Sequence[object]
    ) -> frozenset[int]:
        new = set()
        for action in actions:
            if isinstance(action, Send):
                envelope = Envelope(sender, action.to, action.message)
                index = self._index.setdefault(envelope, len(self._messages))
                if index == len(self._messages):
                    self._messages.append(envelope)
                    said = str(action.message).replace(f"key={KEY}, ", "")
                    self._shown.append(f"{sender.epoch} -> {action.to.epoch} {said}")
                new.add(index)
        return on_way | new if new else on_way

    def _move(
        self, table: bytes, method: str, *args: object
    ) -> tuple[bytes, Sequence[object], object]:
        """The table after a call, the actions it returned, and what else it returned."""
        call = (table, method, *args)
        if call not in self._moves:
            thawed: Any = pickle.loads(table)
            result = getattr(thawed, method)(*args)
            actions = NEWS.take()
            self._moves[call] = (self._freeze(thawed), actions, result)
        return self._moves[call]

    def _freeze(self, table: LeaseTable | InboundTable) -> bytes:
        file = io.BytesIO()
        pickler = pickle.Pickler(file, protocol=5)
        pickler.fast = True  # No memo: equal tables give equal bytes, whoever shares what.
        pickler.dump(table)
        frozen = file.getvalue()
        if frozen not in self._views:
            may_stick = isinstance(table, InboundTable) and table.next_deadline_ms() == 1
            assert isinstance(table.holds, Holds)
            held = frozenset(table.holds.held())
            self._views[frozen] = View(table.me, table.num_live, held, may_stick)
        return frozen

    def _new_leases(self, life: int) -> bytes:
        me, kept = Incarnation("owner", f"O{life}"), self.setting.committed_max
        return self._freeze(self.setting.leases(me, Holds(), NEWS, ttl_ms=1, committed_max=kept))

    def _new_inbound(self, life: int) -> bytes:
        return self._freeze(
            self.setting.inbound(
                Incarnation("reader", f"R{life}"),
                Holds(),
                NEWS,
                commit_repeat_ms=0,
                ask_repeat_ms=0,
                read_stuck_ms=1,
                blocks_per_read_max=1,
            )
        )
