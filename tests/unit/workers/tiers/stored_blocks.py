"""Blocks, keys and contracts for the tests of tiers."""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from disagg.messages.registration import Contract
from disagg.scheduling.actions import TierKey
from disagg.workers.tiers.contract import TierContract
from disagg.workers.tiers.disk_tier import DiskTier
from disagg.workers.tiers.options import EvictionPolicy, TierOptions
from disagg.workers.tiers.protocol import Tier
from disagg.workers.tiers.stored_block import HEADER_BYTES, block_name

BLOCK_BYTES = 512
FILE_BYTES = BLOCK_BYTES + HEADER_BYTES
REGISTERED = Contract(
    model_fingerprint="f" * 64,
    dtype="float32",
    groups=("full layers=(0, 1)", "window layers=(2, 3)"),
    page_format="native-1",
    block_bytes=BLOCK_BYTES,
    hash_block_tokens=16,
    hash_scheme="sha256-chain-v1:0123456789abcdef",
    wire_min=1,
    wire_max=1,
)
CONTRACT = TierContract.of(REGISTERED)
FOREIGN = TierContract.of(replace(REGISTERED, model_fingerprint="0" * 64))


class Clock:
    """Nanoseconds since 1970 that pass by being asked for."""

    def __init__(self, now_ns: int = 1_800_000_000 * 10**9) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        self.now_ns += 1000
        return self.now_ns


def key_of(number: int, group: int = 0) -> TierKey:
    return group, hashlib.sha256(number.to_bytes(8, "little")).digest()


def content_of(key: TierKey, num_bytes: int = BLOCK_BYTES) -> bytes:
    """What the block of a key holds; every key another one."""
    return hashlib.shake_128(key[0].to_bytes(4, "little") + key[1]).digest(num_bytes)


def disk_tier(
    place: Path,
    blocks_max: int = 100,
    contract: TierContract = CONTRACT,
    clock_ns: Callable[[], int] | None = None,
    eviction: EvictionPolicy = "lru",
    **others: str,
) -> DiskTier:
    options = TierOptions(
        "disk",
        "disk",
        str(place),
        blocks_max * FILE_BYTES,
        eviction=eviction,
        others=others,
    )
    return DiskTier(options, contract, clock_ns=clock_ns or Clock())


def write(tier: Tier, keys: Sequence[TierKey]) -> tuple[list[TierKey], list[TierKey]]:
    """Write the keys' blocks; returns stored and evicted."""
    written = tier.write([(key, memoryview(content_of(key))) for key in keys])
    return list(written.stored), list(written.evicted)


def read(tier: Tier, keys: Sequence[TierKey]) -> list[bool]:
    """Read blocks; every one said to be intact is compared with what was written."""
    buffers = [bytearray(b"\xaa" * BLOCK_BYTES) for _ in keys]
    blocks = [(key, memoryview(buffer)) for key, buffer in zip(keys, buffers, strict=True)]
    intact = tier.read(blocks)
    for key, buffer, good in zip(keys, buffers, intact, strict=True):
        assert not good or bytes(buffer) == content_of(key), f"wrong bytes of {key}"
    return list(intact)


def path_of(place: Path, key: TierKey, contract: TierContract = CONTRACT) -> Path:
    return place / contract.name / block_name(key)


def files_in(place: Path) -> list[Path]:
    """Files of blocks, whole or not."""
    return [
        path
        for path in place.glob("*/*")
        if path.name != "contract.json" and path.is_file() and not path.is_symlink()
    ]


def on_threads(work: Callable[[int], None], num_threads: int = 4) -> None:
    """Do it on threads at once, each with its number; raises what any of them raised."""
    with ThreadPoolExecutor(num_threads) as threads:
        for done in [threads.submit(work, number) for number in range(num_threads)]:
            done.result()
