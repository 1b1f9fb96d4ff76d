"""The keyed chain of block hashes; the same code names blocks in workers and in the router."""

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256
from hmac import digest as hmac_digest
from struct import iter_unpack

from disagg.errors import ConfigError, RequestError

_DOMAIN = b"disagg kv chain v1"
_new_sha256 = sha256().copy
"""Copying an empty one is faster than to look the algorithm up for each block."""
SECRET_CHARS_MIN = 32
"""Of the cluster's secret: what workers announce of it would let a short one be guessed."""


def check_secret(secret: str) -> None:
    """Raise ConfigError, without the secret in it, unless it is long enough not to be guessed."""
    if len(secret) < SECRET_CHARS_MIN:
        raise ConfigError(
            f"the secret that names KV blocks needs {SECRET_CHARS_MIN} characters, has "
            f"{len(secret)} (cluster.hash_key_file; disagg keys create-hash-key makes one)",
            param="cluster.hash_key",
        )


def block_hash_key(secret: str, model_fingerprint: str) -> bytes:
    """Key of the block hashes of one model in one cluster.

    Args:
        secret: the cluster's (``cluster.hash_key``), the same for its routers and workers.
        model_fingerprint: of the weights; models that share a secret share no names of blocks.

    Raises:
        ConfigError: the secret is missing or too short; it is not in the message.
    """
    check_secret(secret)
    return hmac_digest(secret.encode(), b"disagg block hashes" + model_fingerprint.encode(), sha256)


def tenant_salt(tenant: str, cache_salt: str) -> bytes:
    """Salt of the chains of one tenant's requests; different tenants never have the same one.

    Args:
        tenant: of the caller's key; "" where the router has no keys.
        cache_salt: what the client sent: it separates further, and leads to no other tenant.
    """
    if not tenant and not cache_salt:
        return b""
    name = tenant.encode()
    # The length says where the name ends: "ab" + "c" is not "a" + "bc".
    return sha256(len(name).to_bytes(4, "little") + name + cache_salt.encode()).digest()


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
        self._unsalted = self.seed()

    @property
    def scheme(self) -> str:
        """What those who name blocks alike have in common; tells nobody the key."""
        mark = hmac_digest(self._key, b"disagg hash scheme", sha256)
        return f"sha256-chain-v2:{mark.hex()[:16]}"

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
        value = hashes[-1] if hashes else self.seed(salt) if salt else self._unsalted
        if end == first + 1:  # as decodes do
            hashes.append(sha256(value + data).digest())
            return
        append, new = hashes.append, _new_sha256
        for (part,) in iter_unpack(f"{stride}s", data):
            block = new()
            block.update(value + part)
            value = block.digest()
            append(value)
