"""What a reader had of a prompt when one of its READs was made to fail."""

from dataclasses import dataclass

from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.reports import TransferKind
from disagg.scheduling.core import WorkerCore
from disagg.transfer.actions import PostRead


@dataclass(frozen=True, slots=True)
class FailedRead:
    """One READ that fails, and everything else there is to go on from."""

    reader: Incarnation
    key: RequestKey
    kind: TransferKind
    num_tokens: int
    """The boundary of the transfer."""
    failed: tuple[tuple[int, int], ...]
    """(group, block index) of its blocks."""
    pulled: tuple[frozenset[int], ...]
    """Per group the block indexes that the transfer brings, the failed ones included."""
    cached: tuple[frozenset[int], ...]
    """Per group the full blocks of the prompt (of states: the ends, counted in blocks of tokens)
    that the reader's cache had already."""


def failed_read(core: WorkerCore, read: PostRead) -> FailedRead:
    """Of a READ that is about to fail; to be taken when it is posted."""
    pull = core.prefix_pull.pulls.get(read.key) or core.decode_side.pulls[read.key]
    kind = TransferKind.PREFIX if read.key in core.prefix_pull.pulls else TransferKind.HANDOVER
    lacks, hashes = pull.reservation.lacks, pull.seq.request.hashes
    places = {block: (group, index) for group, pairs in enumerate(lacks) for index, block in pairs}
    return FailedRead(
        core.me,
        read.key,
        kind,
        pull.reservation.num_external_tokens,
        tuple(places[block] for block in read.dst_blocks),
        tuple(frozenset(index for index, _ in pairs) for pairs in lacks),
        tuple(
            frozenset(
                position
                for position, value in enumerate(manager.chain(hashes))
                if value in core.kv.pool.cache.index(manager.group)
            )
            for manager in core.kv.managers
        ),
    )
