"""A sequence: what its owner keeps of it, and what the coordinator knows besides its tables."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from disagg.errors import InvariantViolation

NEVER = 1 << 62
"""More tokens than any sequence has."""


@dataclass(slots=True, eq=False)
class KVSequence:
    """A token sequence whose KV is kept; owned and grown by the caller.

    Attributes:
        key: name of the sequence, unique among those alive.
        token_ids: all known tokens.
        hashes: chain values of its full hash blocks (see ``BlockHasher.extend``).
        publishes: its finished blocks become findable; False once the cache was reset under it.
    """

    key: Hashable
    token_ids: list[int] = field(default_factory=list, repr=False)
    hashes: list[bytes] = field(default_factory=list, repr=False)
    publishes: bool = True

    @property
    def num_tokens(self) -> int:
        """Number of known tokens."""
        return len(self.token_ids)


@dataclass(slots=True)
class SequenceState:
    """A sequence with tables.

    Attributes:
        request: its tokens and hashes, grown by the caller.
        num_scheduled: tokens computed or in a step that was launched, external ones included.
        num_computed: tokens of steps that have completed, external ones included.
        num_external: set while the tokens up to it are not valid yet.
        room_end: tokens for which every table has room.
        quiet_end: up to so many tokens no table changes, so that a decode step between two
            block ends costs a comparison.
        publish_from: below so many computed tokens there is nothing new to publish (`NEVER`).
        kept: hit lengths at which windows and states stay findable (see ``Retention``).
    """

    request: KVSequence
    num_scheduled: int
    num_computed: int
    num_external: int | None = None
    room_end: int = 0
    quiet_end: int = 0
    publish_from: int = 0
    kept: tuple[int, ...] = ()

    def require_committed(self, act: str) -> None:
        """Check that what comes from elsewhere is valid: nothing else may read a pulled block.

        What must hold: the seal is there, all blocks it counts were offered, all READs are done,
        and after that the owner confirmed, for the current attempt, that it had held them all.
        ``InboundTable.on_commit_answer`` finds that out; its listener calls `commit_external`.

        Where it is enforced: ``KVCacheCoordinator.allocate`` (no step computes on the sequence: the
        short cut for decodes is closed too, as ``quiet_end`` is 0 until then) and its publication.
        A lease or tier holds only what was published or computed, so it passes here by way of
        those. ``PrefixSharing.publish_intact`` alone publishes from a sequence that stays
        uncommitted: what arrived, where the owner confirmed and some READs had failed.

        Raises:
            InvariantViolation: the transfer is not committed; ``act`` names what was to be done.
        """
        if self.num_external is not None:
            raise InvariantViolation(f"{self.request.key!r} would {act} tokens not yet committed")

    def commit_external(self) -> int:
        """Tokens from elsewhere are valid now; returns how many.

        Raises:
            InvariantViolation: no transfer was awaited.
        """
        if self.num_external is None:
            raise InvariantViolation(f"{self.request.key!r} has no uncommitted external tokens")
        num_external, self.num_external = self.num_external, None
        return num_external


def sequence_of(sequences: Mapping[Hashable, SequenceState], key: Hashable) -> SequenceState:
    """A sequence with tables, by key; raises InvariantViolation where there is none."""
    try:
        return sequences[key]
    except KeyError:
        raise InvariantViolation(f"{key!r} has no tables") from None
