"""Messages between two workers. Each is idempotent: it moves a state in a table, never a counter.

The envelope (sender's and addressee's incarnation) is the shell's; a message with a wrong
addressee epoch is answered `WrongEpoch` and changes nothing.
"""

from dataclasses import dataclass, field

from disagg.messages.identity import Attempt, RequestKey


@dataclass(frozen=True, slots=True)
class OfferedRange:
    """Blocks of one group that follow each other in the request and in the owner's pool."""

    group: int
    block_index: int
    """Of the first block, in its request."""
    block_id: int
    """Of the first block, in the owner's pool."""
    num_blocks: int
    checksums: tuple[int, ...] = field(default=(), repr=False)
    """Of each block, as its owner has it; () between workers that compute none."""


@dataclass(frozen=True, slots=True)
class Seal:
    """Closes a lease's list of offers."""

    num_tokens: int
    """Tokens whose KV the lease covers: the prompt's length at a hand-over."""
    num_ranges: tuple[int, ...]
    """Per group."""
    first_token_id: int | None = field(default=None, repr=False)
    """Token 0 of a hand-over; None for a prefix pull."""
    first_logprob: float = 0.0
    first_top_logprobs: tuple[tuple[int, float], ...] = field(default=(), repr=False)


# --- reservation: prefill worker (owner-to-be) -> decode worker (reader-to-be) and back


@dataclass(frozen=True, slots=True)
class Reserve:
    """Requests memory for a hand-over; ``number`` counts up at the prefill worker."""

    key: RequestKey
    number: int
    traceparent: str = field(default="", repr=False)
    """W3C trace context of the prefill, the parent of the transfer; "" where nothing is traced."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """Answer to `Reserve`, at once: a grant with what is lacked, or a refusal with its reason."""

    key: RequestKey
    number: int
    granted: bool
    reason: str = ""
    first_lacked: tuple[int, ...] = ()
    """Per group: position of the first token whose KV must be offered."""


@dataclass(frozen=True, slots=True)
class Release:
    """Frees reservations up to ``number``; later arrivals up to it are refused."""

    key: RequestKey
    number: int


# --- lease


@dataclass(frozen=True, slots=True)
class Offers:
    """Owner -> reader: ranges numbered from ``first``, the seal if there is one, or the end.

    Pushed when something is new, and sent as the answer to `AskOffers` and as the grant of an
    `AskLease` or `TakeOver`.
    """

    key: RequestKey
    lease_id: int
    first: int
    ranges: tuple[OfferedRange, ...] = ()
    seal: Seal | None = None
    dead: bool = False
    request_number: int | None = None
    """Of the `AskLease` or `TakeOver` that the lease answers; None for a lease that its owner
    opened on a reservation."""
    num_computed_tokens: int = 0
    """Of the prefill, as of the last time it went on without blocks to offer: a greater figure
    shows the reader that it goes on."""


@dataclass(frozen=True, slots=True)
class ReadProgress:
    """Reader -> owner, now and then while it reads: a greater figure renews the lease."""

    key: RequestKey
    lease_id: int
    num_blocks_read: int


@dataclass(frozen=True, slots=True)
class AskOffers:
    """Reader -> owner: requests all offers from a number on."""

    key: RequestKey
    lease_id: int | None
    """None: of the generation's live lease, before the reader knows its id."""
    first: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Reader -> owner, after every READ: requests the confirmation that all was held until now."""

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


# --- requests for a lease: reader -> owner; answered by `Offers` with that number, or a refusal


@dataclass(frozen=True, slots=True)
class AskLease:
    """Requests a cached prefix; the lease is born sealed, with all ranges in the answer.

    Refused where reader and owner together have no boundary in all groups.
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
    """Per group: position of the first token whose KV the reader does not hold itself."""
    alignment_tokens: int = 1
    """The reader's prefixes can end at multiples of it."""


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Requests the lease of an earlier generation, whose reader is gone, for this reader."""

    key: RequestKey
    number: int
    old: RequestKey
    first_lacked: tuple[int, ...]
    """As in `AskLease`."""


@dataclass(frozen=True, slots=True)
class LeaseRefused:
    """Owner -> reader: there is no lease for the `AskLease` or `TakeOver` of that number."""

    key: RequestKey
    request_number: int


@dataclass(frozen=True, slots=True)
class LeaseLoading:
    """Owner -> reader: the answer to an `AskLease` or `TakeOver` follows, but not yet.

    A tier brings the prefix, or checksums are computed. Sent for each repetition of the request; a
    greater figure shows the reader that it goes on.
    """

    key: RequestKey
    request_number: int
    num_blocks: int
    """How many have come out of the tier, and how many have their checksum."""


@dataclass(frozen=True, slots=True)
class WithdrawLease:
    """The reader gives a request up: its lease ends, later arrivals of the request are refused."""

    key: RequestKey
    number: int
    reason: str = ""
    """One of `READ_FAULTS` where READs from the owner failed."""


# --- ends


@dataclass(frozen=True, slots=True)
class Ended:
    """Sent to the peer worker by the one that ends its part of a generation."""

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
    | ReadProgress
    | AskOffers
    | Commit
    | CommitAnswer
    | CommitSeen
    | AskLease
    | TakeOver
    | LeaseRefused
    | LeaseLoading
    | WithdrawLease
    | Ended
    | WrongEpoch
)
