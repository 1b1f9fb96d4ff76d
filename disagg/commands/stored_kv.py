"""What `disagg cache` finds in stores of KV blocks, and removes from them."""

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disagg.config import Settings
from disagg.errors import ConfigError
from disagg.workers.tiers.contract import PARTS, place_of_rank
from disagg.workers.tiers.disk_store import LOCK_FILE, DiskStore
from disagg.workers.tiers.object_store import BLOCK_BYTES_MAX, ObjectStore
from disagg.workers.tiers.options import parse_tier, parse_tiers
from disagg.workers.tiers.store import Store
from disagg.workers.tiers.stored_block import HEADER_BYTES, StoredBlock, block_name, why_not

AT_ONCE = 256
"""Blocks removed between two steps of the progress bar."""
UNREADABLE = "unreadable"
"""A block that may be intact: its store fails."""
_TIERS = ("disk:", "object:")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def places_of(settings: Settings) -> list[str]:
    """Directories and URLs of the tiers that outlive a worker; of several ranks one for each.

    Raises:
        ConfigError: there is none.
    """
    tiers = parse_tiers(settings.worker.tiers)
    num_ranks = settings.worker.tensor_parallel
    places = [
        place_of_rank(tier.place, rank, num_ranks)
        for tier in tiers
        if tier.kind in ("disk", "object")
        for rank in range(num_ranks)
    ]
    if not places:
        raise ConfigError(
            "which store? Give its directory or URL, or a configuration whose worker.tiers has one",
            param="STORE",
        )
    return places


def places_in(place: str) -> list[str]:
    """The stores at a directory: its own, and those of ranks in it. A URL's are not looked for.

    Also by the directory's or the URL's tier, as `worker.tiers` names it.

    Raises:
        ConfigError: it looks like such a tier, and is none.
    """
    if place.startswith(_TIERS):
        place = parse_tier(place).place
    parts = [] if "://" in place else sorted(str(one) for one in Path(place).glob(PARTS))
    own = [place] if not parts or (Path(place) / LOCK_FILE).exists() else []
    return own + parts


@contextmanager
def opened(place: str) -> Iterator[Store]:
    """A store by its directory or URL, closed at the end; nothing is made where none is.

    Raises:
        ConfigError: there is none, or it cannot be used.
    """
    store: Store = (
        ObjectStore(place, create=False) if "://" in place else DiskStore(place, create=False)
    )
    try:
        yield store
    finally:
        store.close()


def parse_duration_s(text: str) -> int:
    """Seconds of a time such as ``45s``, ``30m``, ``12h`` or ``7d``.

    Raises:
        ConfigError: no such time.
    """
    match = re.fullmatch(r"([0-9]{1,9})([smhd])", text.strip())
    if not match:
        raise ConfigError(f"{text!r} is not a time such as 30m, 12h or 7d", param="--unused-for")
    return int(match[1]) * _UNITS_S[match[2]]


@dataclass(slots=True)
class Contents:
    """Blocks of one contract in one store.

    Attributes:
        model: start of the model's fingerprint, "?" where the store does not say.
        dtype: of the KV, likewise.
        oldest_ns: last use of the one unused for longest, since 1970.
        newest_ns: last use of any.
    """

    contract: str
    model: str
    dtype: str
    num_blocks: int = 0
    num_bytes: int = 0
    oldest_ns: int = 0
    newest_ns: int = 0
    blocks_of_group: Counter[int] = field(default_factory=Counter)

    def add(self, block: StoredBlock) -> None:
        """Count one block."""
        self.oldest_ns = min(self.oldest_ns or block.used_ns, block.used_ns)
        self.newest_ns = max(self.newest_ns, block.used_ns)
        self.num_blocks += 1
        self.num_bytes += block.num_bytes
        self.blocks_of_group[block.key[0]] += 1

    def as_json(self) -> dict[str, Any]:
        """For programs; times in seconds since 1970."""
        return {
            "contract": self.contract,
            "model_fingerprint": self.model,
            "dtype": self.dtype,
            "num_blocks": self.num_blocks,
            "num_bytes": self.num_bytes,
            "blocks_of_group": {str(g): n for g, n in sorted(self.blocks_of_group.items())},
            "oldest_use": self.oldest_ns / 1e9,
            "newest_use": self.newest_ns / 1e9,
        }


def contents_of(store: Store, contract: str = "") -> list[Contents]:
    """What a store has, by contract, the largest first."""
    found: dict[str, Contents] = {}
    for block in chosen(store, contract):
        name = block.contract_name
        if name not in found:
            found[name] = Contents(name, *_describe(store.contract(name)))
        found[name].add(block)
    return sorted(found.values(), key=lambda one: -one.num_bytes)


def chosen(store: Store, contract: str) -> list[StoredBlock]:
    """The blocks of contracts whose name begins so, unused for longest first."""
    blocks = (block for block in store.blocks() if block.contract_name.startswith(contract))
    return sorted(blocks, key=lambda block: block.used_ns)


def to_evict(
    blocks: Sequence[StoredBlock],
    *,
    bytes_max: int | None,
    unused_s: int | None,
    now_s: float | None = None,
) -> list[StoredBlock]:
    """Of blocks, unused for longest first, those that must go.

    Args:
        blocks: all that count.
        bytes_max: what may stay; None: any number.
        unused_s: what was not used for so long goes; None: nothing for that reason.
        now_s: since 1970; None asks the clock.
    """
    left = sum(block.num_bytes for block in blocks)
    before_ns = 0
    if unused_s is not None:
        before_ns = int(((time.time() if now_s is None else now_s) - unused_s) * 1e9)
    out = []
    for block in blocks:
        if block.used_ns < before_ns or (bytes_max is not None and left > bytes_max):
            out.append(block)
            left -= block.num_bytes
    return out


def verify(
    store: Store, blocks: Iterable[StoredBlock], step: Callable[[int], None]
) -> list[tuple[StoredBlock, str]]:
    """Read blocks and check every byte; returns those that are damaged, with why.

    Args:
        store: where they are.
        blocks: to read; one that is gone by now is not damaged, one whose store fails is
            `UNREADABLE`.
        step: takes the bytes that have been read.
    """
    bad = []
    for block in blocks:
        if why := _why_damaged(store, block):
            bad.append((block, why))
        step(block.num_bytes)
    return bad


def _why_damaged(store: Store, block: StoredBlock) -> str:
    if block.num_bytes > BLOCK_BYTES_MAX:
        return "too large"
    try:
        data = store.load(block)
    except ConfigError:
        return UNREADABLE
    if len(data) <= HEADER_BYTES:
        return "truncated" if data or not block.num_bytes else ""
    body = memoryview(data)[HEADER_BYTES:]
    return why_not(data[:HEADER_BYTES], body, block.key, block.contract_name)


def remove(store: Store, blocks: Sequence[StoredBlock], step: Callable[[int], None]) -> int:
    """Remove blocks; returns how many.

    Args:
        store: where they are.
        blocks: to remove; a worker that looks for one misses it.
        step: takes the bytes that have been removed.

    Raises:
        ConfigError: the store fails.
    """
    num_gone = 0
    for first in range(0, len(blocks), AT_ONCE):
        some = blocks[first : first + AT_ONCE]
        num_gone += store.remove(some)
        step(sum(block.num_bytes for block in some))
    return num_gone


def name_of(block: StoredBlock) -> str:
    """Where in its store a block is."""
    return f"{block.contract_name}/{block_name(block.key)}"


def _describe(text: str) -> tuple[str, str]:
    """Model and type from what a store says of a contract, which anybody may have written."""
    try:
        fields = json.loads(text)["contract"]
        model, dtype = fields["model_fingerprint"], fields["dtype"]
    except (ValueError, KeyError, TypeError):
        return "?", "?"
    is_sound = isinstance(model, str) and isinstance(dtype, str)
    if not (is_sound and model.isalnum() and dtype.replace("_", "").isalnum()):
        return "?", "?"
    return model[:64], dtype[:32]
