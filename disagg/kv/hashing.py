"""The keyed chain of block hashes; the same code names blocks in workers and in the router."""

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256
from struct import iter_unpack

from disagg.errors import ConfigError, RequestError

_DOMAIN = b"disagg kv chain v1"
_new_sha256 = sha256().copy
"""Copying an empty one is faster than to look the algorithm up for each block."""


class BlockHasher:
    """Chain sha256 over full blocks: ``value = sha256(previous value + tokens as uint32 LE)``.

    The first value is derived from ``hash_key`` and the tenant's salt, so nobody without the
    key can name a block, and tenants with different salts share nothing. A value stands for
    the whole prefix up to the end of its block.
    """

    def __init__(self, hash_key: bytes, block_tokens: int) -> None:
        if not hash_key:
            raise ConfigError("hash_key must not be empty", param="hash_key")
        if block_tokens < 1:
            raise ConfigError("block_tokens must be positive", param="block_tokens")
        self.block_tokens = block_tokens
        self._key = sha256(
            _DOMAIN + block_tokens.to_bytes(4, "little") + sha256(hash_key).digest()
        ).digest()

    def seed(self, salt: bytes = b"") -> bytes:
        """Chain value before the first block (never the key of a block)."""
        return sha256(self._key + salt).digest()

    def extend(self, hashes: list[bytes], token_ids: Sequence[int], salt: bytes = b"") -> None:
        """Append to ``hashes`` the values of the blocks of ``token_ids`` that became full.

        Args:
            hashes: values of the first ``len(hashes)`` blocks of the same tokens; changed.
            token_ids: all tokens of the sequence.
            salt: the tenant's salt (with LoRA and multimodal ids appended by the caller).

        Raises:
            RequestError: a token id is not an unsigned 32-bit integer; ``hashes`` is unchanged.
        """
        size = self.block_tokens
        first, end = len(hashes), len(token_ids) // size
        if end <= first:
            return
        try:
            whole = not first and end * size == len(token_ids)
            packed = array("I", token_ids if whole else token_ids[first * size : end * size])
        except (OverflowError, TypeError) as error:
            raise RequestError(
                "a token id is not an unsigned 32-bit integer", param="token_ids"
            ) from error
        if sys.byteorder != "little":
            packed.byteswap()
        data, stride = packed.tobytes(), 4 * size
        value = hashes[-1] if hashes else self.seed(salt)
        if end == first + 1:  # as decodes do
            hashes.append(sha256(value + data).digest())
            return
        append, new = hashes.append, _new_sha256
        for (part,) in iter_unpack(f"{stride}s", data):
            block = new()
            block.update(value + part)
            value = block.digest()
            append(value)
