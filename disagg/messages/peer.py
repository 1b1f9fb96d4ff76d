"""Messages between two workers. Each is idempotent: it moves a state in a table, never a counter.

The envelope (sender's and addressee's incarnation) is the shell's; a message with a wrong
addressee epoch is answered `WrongEpoch` and changes nothing.
"""

from dataclasses import dataclass

from disagg.messages.identity import Attempt, RequestKey


@dataclass(frozen=True, slots=True)
class OfferedRange:
    """Blocks of one group at consecutive positions, adjacent in the owner's pool.

    Position is the block's index in its request; block ids are the owner's.
    """

    group: int
    position: int
    block_id: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Seal:
    """Closes a lease's list of offers."""

    num_tokens: int
    """Tokens whose KV the lease covers: the prompt's length at a hand-over."""
    num_ranges: tuple[int, ...]
    """Per group."""
    first_token_id: int = -1
    """Token 0 of a hand-over; -1 for a prefix pull."""
    first_logprob: float = 0.0
    first_top_logprobs: tuple[tuple[int, float], ...] = ()


# --- reservation: prefill worker (owner-to-be) -> decode worker (reader-to-be) and back


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ask for memory for a hand-over; ``number`` counts up at the asker."""

    key: RequestKey
    number: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """Answer to `Reserve`, at once: yes with what is lacked, or no with the reason."""

    key: RequestKey
    number: int
    granted: bool
    reason: str = ""
    first_lacked: tuple[int, ...] = ()
    """Per group: first block position that must be offered."""


@dataclass(frozen=True, slots=True)
class Release:
    """Frees reservations up to ``number``; later arrivals up to it are refused."""

    key: RequestKey
    number: int


# --- lease


@dataclass(frozen=True, slots=True)
class Offers:
    """Owner -> reader: ranges numbered from ``first``, the seal if there is one, or the end.

    Pushed when something is new and sent as the answer to `AskOffers`.
    """

    key: RequestKey
    lease_id: int
    first: int
    ranges: tuple[OfferedRange, ...] = ()
    seal: Seal | None = None
    dead: bool = False
    number: int = 0
    """Of the `AskLease` or `TakeOver` that is answered; 0 where there was none."""


@dataclass(frozen=True, slots=True)
class AskOffers:
    """Reader -> owner: all offers from a number on."""

    key: RequestKey
    lease_id: int
    first: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Reader -> owner, after every READ is done: did you hold all of it until now?"""

    key: RequestKey
    lease_id: int
    attempt: Attempt
    num_ranges: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CommitAnswer:
    """Owner -> reader: only ``ok`` for the current attempt makes the blocks readable."""

    key: RequestKey
    lease_id: int
    attempt: Attempt
    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CommitSeen:
    """Reader -> owner: the answer arrived; the owner may forget the lease."""

    key: RequestKey
    lease_id: int
    attempt: Attempt


# --- asking for a lease: reader -> owner; the answer is an `Offers` of that number


@dataclass(frozen=True, slots=True)
class AskLease:
    """Ask for a cached prefix; the lease is born sealed, with all ranges in the answer.

    The answer is dead where reader and owner together have no boundary in all groups.
    """

    key: RequestKey
    number: int
    """Counts up at the reader; a repeated one gets its old answer again."""
    num_tokens: int
    """The longest boundary that is of use."""
    first_hash: int
    """Index of the first of ``hashes``."""
    hashes: tuple[bytes, ...]
    """Chain values from there to ``num_tokens``."""
    first_lacked: tuple[int, ...]
    """Per group: first block position that the reader does not hold itself."""


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Ask for the lease of an earlier generation, whose reader is gone; for this reader now."""

    key: RequestKey
    number: int
    old: RequestKey
    first_lacked: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WithdrawLease:
    """The reader gives the answer to a question up: its lease ends, later arrivals get none."""

    key: RequestKey
    number: int
    reason: str = ""
    """One of `READ_FAULTS` where READs from the owner failed."""


# --- ends


@dataclass(frozen=True, slots=True)
class Ended:
    """Whoever ends its part of a generation tells the peer worker directly."""

    key: RequestKey
    reason: str


@dataclass(frozen=True, slots=True)
class WrongEpoch:
    """Answer to a message addressed to another incarnation; nothing was changed."""

    expected_epoch: str


PeerMessage = (
    Reserve
    | Reserved
    | Release
    | Offers
    | AskOffers
    | Commit
    | CommitAnswer
    | CommitSeen
    | AskLease
    | TakeOver
    | WithdrawLease
    | Ended
    | WrongEpoch
)
