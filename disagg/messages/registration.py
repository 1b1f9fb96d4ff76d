"""What a worker registers with: its contract, its KV cache groups, its limits."""

from dataclasses import dataclass, fields

from disagg.messages.identity import Incarnation


@dataclass(frozen=True, slots=True)
class Contract:
    """What two workers must agree on before KV moves between them.

    Compared field by field at registration; unequal workers are never paired.
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

    def mismatches(self, other: "Contract") -> tuple[str, ...]:
        """Name, ours and theirs of every field that forbids pairing; empty when compatible."""
        bad = [
            f"{f.name}: {getattr(self, f.name)!r} != {getattr(other, f.name)!r}"
            for f in fields(self)
            if not f.name.startswith("wire_") and getattr(self, f.name) != getattr(other, f.name)
        ]
        if self.wire_min > other.wire_max or other.wire_min > self.wire_max:
            bad.append(
                f"wire versions: {self.wire_min}..{self.wire_max} and "
                f"{other.wire_min}..{other.wire_max} do not overlap"
            )
        return tuple(bad)


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
