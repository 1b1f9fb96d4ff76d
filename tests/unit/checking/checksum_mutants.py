"""Checksums with one rule taken away each; the explorer must find what breaks."""

from collections.abc import Sequence

from disagg.errors import InvariantViolation
from disagg.transfer.reader.reads import Read
from disagg.transfer.reader.table import InboundTable
from disagg.transfer.reader.transfer import InboundTransfer


class ComparesNothing(InboundTable):
    """Believes what READs bring, as without checksums."""

    def _differing(self, read: Read, checksums: Sequence[int]) -> list[tuple[int, int]]:
        return []


class CommitsBeforeTheyAreKnown(InboundTable):
    """Commits when every READ is done, whatever their checksums will be."""

    def _reads_done(self, entry: InboundTransfer) -> bool:
        return not entry.reads


class ExpectsNoDifference(InboundTable):
    """Not a rule taken away: where nothing goes wrong no block may come with another checksum."""

    def _differing(self, read: Read, checksums: Sequence[int]) -> list[tuple[int, int]]:
        if found := super()._differing(read, checksums):
            raise InvariantViolation(f"{found} differ")
        return []
