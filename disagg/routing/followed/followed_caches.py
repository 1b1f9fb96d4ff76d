"""Caches of servers that are no workers of this router, known by their KV events alone."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from disagg.errors import ConfigError, ProtocolError
from disagg.messages.identity import Incarnation
from disagg.messages.kv_events import KVEvent
from disagg.messages.router import CacheMatch
from disagg.routing.followed.block_names import BlockNames, Layout, SaltOf
from disagg.routing.followed.event_order import AskReplay, EventOrder, Lost, Step
from disagg.routing.followed.vllm_events import GROUPS_MAX, Message
from disagg.routing.index import PrefixIndex
from disagg.routing.revisions import HashExtend

TAKEN_IN_BLOCKS = 2_048
"""Of messages that are due, at once."""


@dataclass(frozen=True, slots=True)
class FollowedView:
    """One followed cache as operators see it."""

    name: str
    is_complete: bool
    """Connected, and nothing that was published is known to be missing."""
    num_blocks: int
    num_batches: int
    num_losses: int
    """Times that all it held was forgotten: events could not be had, or the server went."""
    num_unnamed: int
    """Blocks left out, as what comes before them was never told of, or an adapter is in them."""
    problem: str
    """What could not be understood last; "" for nothing."""


class FollowedCaches:
    """What followed servers hold of a prompt, by the router's own index.

    Servers of one layout of groups share an index. A layout is learned from stored events, so a
    server is in no index before all its groups have stored something.

    Args:
        extend: names blocks of ``name_tokens`` tokens.
        name_tokens: must divide the block sizes of all servers.
        blocks_max: of one server that are kept in mind.
    """

    def __init__(self, extend: HashExtend, name_tokens: int, blocks_max: int = 1 << 20) -> None:
        self._extend = extend
        self._name_tokens = name_tokens
        self._blocks_max = blocks_max
        self._indexes: dict[Layout, PrefixIndex] = {}
        self._caches: dict[str, FollowedCache] = {}
        self._tenants: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._caches)

    def follow(
        self, name: str, salt_of: SaltOf, *, can_replay: bool, tenant: str = ""
    ) -> "FollowedCache":
        """Know one more server, of a tenant; its messages go to what is returned.

        Raises:
            ConfigError: another one has the name.
        """
        if name in self._caches:
            raise ConfigError(f"{name!r} is there twice", param="router.kv_event_endpoints")
        self._tenants[name] = tenant
        names = BlockNames(self._extend, self._name_tokens, salt_of, self._blocks_max)
        self._caches[name] = cache = FollowedCache(
            Incarnation(name, "followed"), names, self._indexes, self._name_tokens, can_replay
        )
        return cache

    def views(self) -> list[FollowedView]:
        """All of them, in the order in which they were added."""
        return [cache.view() for cache in self._caches.values()]

    def hashes(self, token_ids: Sequence[int], salt: bytes) -> list[bytes]:
        """Chain values of a prompt; may run in any thread."""
        hashes: list[bytes] = []
        self._extend(hashes, token_ids, salt)
        return hashes

    def match(self, num_tokens: int, hashes: Sequence[bytes], tenant: str = "") -> list[CacheMatch]:
        """What each of a tenant's servers holds of a prompt, longest usable prefix first.

        See `PrefixIndex.match`.
        """
        hits = [index.match(num_tokens, hashes) for index in self._indexes.values()]
        found = [
            CacheMatch(worker.worker_id, hit.usable_tokens, hit.group_tokens)
            for part in hits
            for worker, hit in part.items()
            if self._tenants[worker.worker_id] == tenant
        ]
        return sorted(found, key=lambda one: (-one.usable_tokens, one.name))


class FollowedCache:
    """One server's events in order, and what they say in an index.

    Every method returns the replay to ask for, if one is due. Much that is due at once is taken in
    in parts, in the same order: the caller calls `take_in` until no more of it waits.

    Args:
        member: what the index calls the server.
        names: our names for its blocks.
        indexes: by layout, shared with others.
        name_tokens: tokens that a name stands for.
        can_replay: the server answers requests for a replay.

    Attributes:
        layout: its groups, as far as they have said of themselves.
        problem: what could not be understood last; "" for nothing.
    """

    def __init__(
        self,
        member: Incarnation,
        names: BlockNames,
        indexes: dict[Layout, PrefixIndex],
        name_tokens: int,
        can_replay: bool,
    ) -> None:
        self._member = member
        self._names = names
        self._indexes = indexes
        self._name_tokens = name_tokens
        self._order: EventOrder[Message] = EventOrder(can_replay=can_replay)
        self._due: deque[Message | Lost] = deque()
        """In its turn, and not taken in yet, or the first one not whole."""
        self._parts: Iterator[tuple[int, list[KVEvent]]] | None = None
        """Of the first one."""
        self.layout: Layout = ()
        self.problem = ""
        self._num_batches = self._num_losses = 0

    @property
    def is_asking(self) -> bool:
        """See `EventOrder.is_asking`."""
        return self._order.is_asking

    @property
    def has_due(self) -> bool:
        """Something waits for `take_in`."""
        return bool(self._due)

    def connected(self, now_ms: int) -> AskReplay | None:
        """The server publishes to us."""
        return self._do(self._order.connected(now_ms))

    def disconnected(self) -> None:
        """It does not any more: nothing is known of it."""
        self._due.clear()
        self._parts = None
        self._do(self._order.disconnected())

    def live(self, now_ms: int, number: int, message: Message) -> AskReplay | None:
        """It published a message."""
        return self._do(self._order.live(now_ms, number, message))

    def replayed(self, now_ms: int, number: int, message: Message) -> AskReplay | None:
        """It repeated one, as was asked last."""
        return self._do(self._order.replayed(now_ms, number, message))

    def replay_ended(self, now_ms: int) -> AskReplay | None:
        """It has repeated all."""
        return self._do(self._order.replay_ended(now_ms))

    def tick(self, now_ms: int) -> AskReplay | None:
        """Call it about once a second."""
        return self._do(self._order.tick(now_ms))

    def unreadable(self, why: str) -> None:
        """A message could not be unpacked; whatever it said, what is known is not true any more."""
        self._lose()
        self.problem = why

    def view(self) -> FollowedView:
        """As operators see it."""
        return FollowedView(
            self._member.worker_id,
            self._order.is_complete and not self._due,
            len(self._names),
            self._num_batches,
            self._num_losses,
            self._names.num_unnamed,
            self.problem,
        )

    def _do(self, steps: Sequence[Step[Message]]) -> AskReplay | None:
        ask = None
        for step in steps:
            match step:
                case AskReplay():
                    ask = step
                case Lost():
                    self._due.append(step)
                case (message,):
                    self._due.append(message)
        if self._order.is_foreign:
            self.problem = "the address of replay is of another server; it is not asked any more"
        self.take_in()
        return ask

    def take_in(self) -> None:
        """Take in some of what is due: some milliseconds of work."""
        left = TAKEN_IN_BLOCKS
        while self._due and left > 0:
            try:
                left -= self._take_in_part(self._due[0])
            except (ProtocolError, ConfigError) as error:
                self.unreadable(error.message)
                self._next_due()

    def _take_in_part(self, due: Message | Lost) -> int:
        """Returns a measure of the work that it was."""
        if isinstance(due, Lost):
            self._lose()
            self._next_due()
            return 1
        if self._parts is None:
            self._num_batches += 1
            if isinstance(due, ProtocolError):
                raise due
            self._parts = self._names.take_in(due)
        part = next(self._parts, None)
        if part is None:
            self._next_due()
            return 1
        num_blocks, events = part
        layout = self._names.layout
        if layout != self.layout:
            self._move(layout)
            events = self._names.held()
        if layout:
            index = self._indexes[layout]
            index.apply(self._member, index.next_sequence(self._member), None, events)
        return 1 + num_blocks

    def _next_due(self) -> None:
        self._due.popleft()
        self._parts = None

    def _lose(self) -> None:
        self._num_losses += len(self._names) > 0
        self._names.clear()
        self._move(())

    def _move(self, layout: Layout) -> None:
        """Leave one index, with all that it knows of this server, for another."""
        if self.layout:
            index = self._indexes[self.layout]
            index.remove(self._member)
            if not index:
                del self._indexes[self.layout]
        self.layout = layout
        if layout:
            if layout not in self._indexes:
                self._indexes[layout] = PrefixIndex(layout, self._name_tokens)
            self._indexes[layout].add(self._member, GROUPS_MAX * self._names.blocks_max)
