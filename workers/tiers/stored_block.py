"""A block as disks and object stores keep it: a header, then its bytes; and its name there."""

import re
import struct
from dataclasses import dataclass

import xxhash

from disagg.scheduling.actions import TierKey
from disagg.workers.tiers.contract import FORMAT, TierContract
from disagg.workers.tiers.protocol import KEY_BYTES_MAX

MAGIC = b"DISAGGKV"
_FIELDS = struct.Struct("<8sIIQH64s32s")
"""Magic, format, group, bytes of the block, bytes of the chain value, chain value, contract."""
_CHECKSUM_BYTES = 16
HEADER_BYTES = _FIELDS.size + _CHECKSUM_BYTES
_NAME = re.compile(r"(0|[1-9][0-9]{0,8})-((?:[0-9a-f]{2}){1,64})")
_CONTRACT_NAME = re.compile(r"[0-9a-f]{32}")
CONTRACT_FILE = "contract.json"
"""Beside the blocks of a contract, for people: which model they are of."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block that a store lists.

    Attributes:
        contract_name: of the contract it lies under.
        num_bytes: that it takes, header included.
        used_ns: when it was last used, or written where the store does not know; since 1970.
    """

    contract_name: str
    key: TierKey
    num_bytes: int
    used_ns: int


def block_name(key: TierKey) -> str:
    """What a block is called among those of its contract."""
    return f"{key[0]}-{key[1].hex()}"


def parse_block_name(name: str) -> TierKey | None:
    """The key of a block by its name, None for every other name: a store may hold anything."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), bytes.fromhex(match[2])) if match else None


def is_contract_name(name: str) -> bool:
    """Whether a folder's name is that of a contract."""
    return _CONTRACT_NAME.fullmatch(name) is not None


def header_of(contract: TierContract, key: TierKey, block: memoryview) -> bytes:
    """The header of a block, ``HEADER_BYTES`` long."""
    group, value = key
    if not 0 < len(value) <= KEY_BYTES_MAX:
        raise ValueError(f"a chain value has 1 to {KEY_BYTES_MAX} bytes, not {len(value)}")
    fields = _FIELDS.pack(
        MAGIC, FORMAT, group, len(block), len(value), value, contract.digest
    )  # fmt: skip
    return fields + _checksum(fields, block)


def why_not(header: bytes, block: memoryview, key: TierKey, contract_name: str) -> str:
    """Why a header and what follows it are not the block wanted, "" if they are, every byte.

    Returns:
        ``foreign`` for a block of another contract or format, or that is another block than its
        name says; ``truncated`` for one of another length; ``corrupt`` for damage.
    """
    if header[:8] != MAGIC:
        return "corrupt"
    _, version, group, size, key_bytes, value, digest = _FIELDS.unpack_from(header)
    if version != FORMAT:
        return "foreign"
    if header[-_CHECKSUM_BYTES:] != _checksum(header[: _FIELDS.size], block):
        return "truncated" if size != len(block) else "corrupt"
    if (group, value[:key_bytes]) != key or digest.hex()[:32] != contract_name:
        return "foreign"
    return ""


def _checksum(fields: bytes, block: memoryview) -> bytes:
    """Over the header's fields and the block: it tells damage, and keeps nobody from forging."""
    sum_ = xxhash.xxh3_128(fields)
    sum_.update(block)
    return sum_.digest()
