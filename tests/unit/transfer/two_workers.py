"""Two workers for the tests of this folder: real block pools, messages carried by hand."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from disagg.kv.blocks.block_pool import BlockPool
from disagg.messages.identity import Attempt, Incarnation, RequestKey
from disagg.messages.peer import Commit, CommitAnswer, OfferedRange, Offers, PeerMessage, Seal
from disagg.testing.table_news import TableNews
from disagg.transfer.actions import Send
from disagg.transfer.checksums import Checksums
from disagg.transfer.owner.table import LeaseTable
from disagg.transfer.reader.table import InboundTable

OWNER, READER = Incarnation("owner", "O1"), Incarnation("reader", "R1")
READER_AGAIN, OWNER_AGAIN = Incarnation("reader", "R2"), Incarnation("owner", "O2")
KEY, OTHER_KEY = RequestKey("a", 0), RequestKey("b", 0)
TTL, COMMITTED_MAX, COMMIT_REPEAT, ASK_REPEAT, STUCK, PIECE = 1000, 2, 50, 100, 500, 2


class Said:
    """A table, or several over one outbox; each move returns what it caused, news included.

    Moves with a result of their own return that; what they caused comes with the next move.
    """

    def __init__(self, table: Any, news: TableNews) -> None:
        self._table = table
        self._news = news

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._table, name)
        if not callable(found) or name in ("next_deadline_ms", "next_expiry_ms"):
            return found
        move: Callable[..., Any] = found

        @wraps(move)
        def said(*args: Any, **more: Any) -> Any:
            result = move(*args, **more)
            return self._news.take() if result is None else result

        return said


class Owner:
    """A lease table over a pool of which blocks 1..8 are a running request's."""

    def __init__(self, *, with_checksums: bool = False) -> None:
        self.pool = BlockPool(17, 2)
        self.free = self.pool.num_free
        self.blocks = self.pool.allocate(8)
        self.news = TableNews()
        self.checksums = Checksums(self.news, PIECE)
        self.leases = LeaseTable(
            OWNER,
            self.pool,
            self.news,
            ttl_ms=TTL,
            committed_max=COMMITTED_MAX,
            checksums=self.checksums if with_checksums else None,
        )
        self.table = Said(self.leases, self.news)

    def sealed(self, key: RequestKey = KEY, reader: Incarnation = READER) -> int:
        """A lease with blocks 0, 1 of group 0 and block 1 of group 1, sealed at 0 ms."""
        lease: int = self.open(key, reader)
        self.table.offer(0, lease, [[(0, self.blocks[0])], []])
        self.table.seal(0, lease, [[(1, self.blocks[2])], [(1, self.blocks[4])]], 8, 42)
        return lease

    def open(
        self,
        key: RequestKey = KEY,
        reader: Incarnation = READER,
        first_lacked: tuple[int, ...] = (),
    ) -> int:
        lease: int = self.table.open(0, key, reader, self.news, first_lacked)
        return lease

    def let_request_go(self) -> None:
        self.pool.release(self.blocks)


class Reader:
    """An inbound table over a pool with 4 destinations: blocks 0, 1 of groups 0 and 1."""

    def __init__(self, *, with_checksums: bool = False) -> None:
        self.pool = BlockPool(9, 2)
        self.free = self.pool.num_free
        self.news = TableNews()
        self.checksums = Checksums(self.news, PIECE)
        table = InboundTable(
            READER,
            self.pool,
            self.news,
            commit_repeat_ms=COMMIT_REPEAT,
            ask_repeat_ms=ASK_REPEAT,
            read_stuck_ms=STUCK,
            blocks_per_read_max=PIECE,
            checksums=self.checksums if with_checksums else None,
        )
        self.table = Said(table, self.news)

    def begin(self, key: RequestKey = KEY, owner: Incarnation = OWNER) -> list[int]:
        """Destinations, held by the transfer alone."""
        blocks = self.pool.allocate(4)
        pairs = list(enumerate(blocks))
        self.table.begin(0, key, owner, [pairs[:2], [(p - 2, b) for p, b in pairs[2:]]], self.news)
        self.pool.release(blocks)
        return blocks

    def committing(self) -> Commit:
        """A transfer whose Commit was sent at 0 ms."""
        self.begin()
        self.table.on_offers(0, OWNER, offers())
        self.table.on_read_done(0, 1)
        (send,) = self.table.on_read_done(0, 2)
        assert isinstance(send, Send)
        assert isinstance(send.message, Commit)
        return send.message


RANGES = (OfferedRange(0, 0, 11, 2), OfferedRange(1, 0, 21, 1), OfferedRange(1, 1, 31, 1))
SEAL = Seal(8, (1, 2), 42)


def offers(
    first: int = 0,
    ranges: tuple[OfferedRange, ...] = RANGES,
    seal: Seal | None = SEAL,
    lease_id: int = 1,
    key: RequestKey = KEY,
) -> Offers:
    """What the owner of a `Reader`'s transfer sends: by default everything."""
    return Offers(key, lease_id, first, ranges, seal)


def commit(
    lease: int,
    number: int = 1,
    counts: tuple[int, ...] = (2, 1),
    key: RequestKey = KEY,
    epoch: str = "R1",
) -> Commit:
    """The Commit of an `Owner`'s sealed lease."""
    return Commit(key, lease, Attempt(epoch, number), counts)


def answer(ok: bool, number: int = 1, lease: int = 1, epoch: str = "R1") -> CommitAnswer:
    """The answer to a `Reader`'s Commit."""
    return CommitAnswer(KEY, lease, Attempt(epoch, number), ok)


def sent(actions: Sequence[object]) -> list[PeerMessage]:
    """The messages among actions."""
    return [action.message for action in actions if isinstance(action, Send)]
