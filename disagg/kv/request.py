"""Values that callers and the coordinator exchange."""

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class KVRequest:
    """A token sequence whose KV is kept; owned and grown by the caller.

    Attributes:
        key: name of the sequence, unique among those alive.
        token_ids: all known tokens.
        hashes: chain values of its full hash blocks (see ``BlockHasher.extend``).
    """

    key: Hashable
    token_ids: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Number of known tokens."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class CacheHit:
    """A cached prefix; valid until the next call that allocates or moves a window: no holds yet.

    Attributes:
        num_tokens: length of the prefix.
        block_ids: per group one id per block of the prefix; NULL_BLOCK where none is needed.
    """

    num_tokens: int
    block_ids: tuple[list[int], ...]


@dataclass(frozen=True, slots=True)
class ExternalReservation:
    """Blocks taken for tokens that will be pulled; valid until commit_external or free.

    Attributes:
        num_external_tokens: tokens that are computed elsewhere.
        hit_tokens: per group how many of them are cached here already.
        lacks: per group the (block index, block id) pairs that must be pulled.
    """

    num_external_tokens: int
    hit_tokens: tuple[int, ...]
    lacks: tuple[tuple[tuple[int, int], ...], ...]
