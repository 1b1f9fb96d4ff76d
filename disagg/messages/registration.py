"""What a worker registers with: its contract, its KV cache groups, its limits."""

import re
from dataclasses import dataclass, fields

from disagg.messages.forms import GroupForm, form_mismatches
from disagg.messages.identity import Incarnation

WIRE_MIN = WIRE_MAX = 1
"""Versions of the messages that this release speaks: another one is refused at registration."""
DEFAULT_REVISION = "default"
"""Of workers that name none."""
REVISION_NAME = re.compile(r"[A-Za-z0-9._-]{1,63}")
_BY_FORM = ("groups", "block_bytes", "num_ranks", "forms")
"""Fields that may differ where blocks of one form can be read as parts of the other's."""


@dataclass(frozen=True, slots=True)
class Contract:
    """What two workers must agree on before KV moves between them.

    Compared field by field at registration. Workers whose blocks differ in size only, or in how
    many ranks share them, exchange parts of blocks (`disagg/transfer/read_plan.py`).
    """

    model_fingerprint: str
    dtype: str
    groups: tuple[str, ...]
    """One canonical line per KV cache group: its spec and its layers."""
    page_format: str
    """How an engine lays KV out inside a page; opaque: only equal ones may be exchanged."""
    block_bytes: int
    hash_block_tokens: int
    hash_scheme: str
    wire_min: int
    wire_max: int
    num_ranks: int = 1
    """Processes that hold a part of every block each (tensor parallel)."""
    forms: tuple[GroupForm, ...] = ()
    """How each group's KV lies in a rank's blocks; none where only equal workers may read it."""
    layout_version: int = 0
    """Of the rules by which pages are laid out in blocks; releases of equal ones pair. 0: from a
    release that did not name it."""
    checksums: str = ""
    """Algorithm of the checksums that offers carry of each block and readers compare; "" for none.
    They are of whole blocks: workers that read parts of each other's do without."""

    def has_equal_blocks(self, other: "Contract") -> bool:
        """Whether whole blocks are exchanged, of as many ranks on both sides."""
        return all(getattr(self, name) == getattr(other, name) for name in _BY_FORM)

    def mismatches(self, other: "Contract") -> tuple[str, ...]:
        """Name, ours and theirs of every field that forbids pairing; empty when compatible."""
        bad = [
            f"{f.name}: {getattr(self, f.name)!r} != {getattr(other, f.name)!r}"
            for f in fields(self)
            if not f.name.startswith("wire_")
            and f.name not in _BY_FORM
            and getattr(self, f.name) != getattr(other, f.name)
        ]
        if self.wire_min > other.wire_max or other.wire_min > self.wire_max:
            bad.append(
                f"wire versions: {self.wire_min}..{self.wire_max} and "
                f"{other.wire_min}..{other.wire_max} do not overlap"
            )
        return (*bad, *self.block_mismatches(other))

    def block_mismatches(self, other: "Contract") -> tuple[str, ...]:
        """The part of it that is about blocks: why neither can read parts of the other's."""
        if self.has_equal_blocks(other):
            return ()
        why = form_mismatches(self.forms, self.num_ranks, other.forms, other.num_ranks)
        if self.checksums:
            problem = (
                f"checksums: {self.checksums} is of whole blocks, these would be read in parts"
            )
            why = (*why, problem)
        if not why:
            return ()
        unequal = [
            f"{name}: {getattr(self, name)!r} != {getattr(other, name)!r}"
            for name in _BY_FORM
            if name != "forms" and getattr(self, name) != getattr(other, name)
        ]
        return (*unequal, *why)

    def refusal(self, name: str, other: "Contract", other_name: str) -> str:
        """Why two workers never pair, with both contracts printed; "" where they may."""
        bad = self.mismatches(other)
        return (
            f"contracts of {name} and {other_name} differ: {'; '.join(bad)} "
            f"({name}: {self}; {other_name}: {other})"
            if bad
            else ""
        )


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """What routing needs to know of one KV cache group."""

    kind: str
    block_tokens: int
    window_tokens: int
    """0 where the kind has none."""
    num_layers: int
    useful_bytes: int
    """Of one block."""


@dataclass(frozen=True, slots=True)
class TierInfo:
    """A tier of a worker; their order is that in which they are asked, and numbers them."""

    name: str
    num_blocks: int
    """Most blocks that it keeps."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker registers with: who and where it is, and how much fits there."""

    incarnation: Incarnation
    address: str
    role: str
    model: str
    contract: Contract
    groups: tuple[GroupInfo, ...]
    max_model_tokens: int
    """Longest prompt plus output that can end there: the model's limit, or what one sequence may
    hold of the empty pool where that is less."""
    handover_tokens_max: int
    """Longest prompt whose hand-over fits this worker's share of the pool."""
    num_blocks: int
    tiers: tuple[TierInfo, ...] = ()
    max_sequences: int = 0
    """Requests that it runs at once; 0: from a release that did not say."""
    revision: str = DEFAULT_REVISION
    """Name of what is served: workers are paired within one revision only."""
    tokenizer_digest: str = ""
    """Of its checkpoint's tokenizer (`disagg/grammar/tokenizer_digest.py`); "": it did not say."""
    takes_drain: bool = False
    """It knows `Drain`; an older one would end the session at it."""
    takes_batches: bool = False
    """It knows that a message of a session may have more of them behind it."""
