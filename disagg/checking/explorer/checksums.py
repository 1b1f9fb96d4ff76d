"""Checksums of the blocks of a small world's pools, each computed at any moment."""

from collections.abc import Iterator
from hashlib import sha256

from disagg.checking.explorer.exploration import Step
from disagg.checking.explorer.moves import Moves
from disagg.checking.explorer.state import State


def checksum_of(content: str) -> int:
    """Of a block, by what it contains then; different contents have different ones."""
    return int.from_bytes(sha256(content.encode()).digest()[:8])


def checksum_steps(moves: Moves, now: State) -> Iterator[Step[State]]:
    """The checksums that can be known next."""
    for one in now.sums:
        content = moves.workers.memory[now.workers[one.side]][one.block]
        after = now._replace(sums=tuple(other for other in now.sums if other != one))
        label = f"the checksum of block {one.block} is known"
        known = ("on_checksums", 0, one.request_id, (checksum_of(content),))
        yield moves.does(after, one.side, label, *known)
