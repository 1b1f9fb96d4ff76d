"""Checksums of the own pool's blocks: what is computed for whom.

Both sides of a transfer have them computed in the same way: an owner of the blocks that it offers,
a reader of the same blocks when they have been read.
"""

from collections.abc import Sequence
from typing import Protocol

from disagg.transfer.actions import ComputeChecksums, Outbox


class WantsChecksums(Protocol):
    """Gets the checksums that it asked for."""

    def summed(self, now_ms: int, subject: int, checksums: Sequence[int]) -> None:
        """The checksums of the blocks given for a subject are known, in their order."""


class Checksums:
    """Checksums that are being computed, and who waits for them.

    As many as the callers ask for: a lease for one piece at a time, a transfer once for each READ
    that has ended. Nothing is held for them: who gives blocks up ignores what comes of them.

    Args:
        out: takes the requests.
        blocks_max: of one request.

    Attributes:
        blocks_max: as given.
    """

    def __init__(self, out: Outbox, blocks_max: int) -> None:
        self._out = out
        self._last_id = 0
        self._waiting: dict[int, tuple[WantsChecksums, int]] = {}
        self.blocks_max = blocks_max

    def compute(self, who: WantsChecksums, subject: int, blocks: Sequence[int]) -> None:
        """Have the checksums of blocks computed, as they are there now or a moment later.

        Args:
            who: gets them.
            subject: by what it knows again what they are for.
            blocks: at most ``blocks_max``; nobody may write to them until then.
        """
        self._last_id += 1
        self._waiting[self._last_id] = who, subject
        self._out.add(ComputeChecksums(self._last_id, tuple(blocks)))

    def on_computed(self, now_ms: int, request_id: int, checksums: Sequence[int]) -> None:
        """Checksums are there; unknown ids are ignored."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            who, subject = waiting
            who.summed(now_ms, subject, checksums)
