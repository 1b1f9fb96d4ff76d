"""Blocks that a sequence finds in the cache, or takes for what will be pulled."""

from dataclasses import dataclass


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
