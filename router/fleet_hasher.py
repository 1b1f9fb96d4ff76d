"""How the fleet names KV blocks: known when its first worker registers."""

from collections.abc import Sequence

from disagg.errors import ConfigError, RemoteFault
from disagg.kv.hashing import BlockHasher, block_hash_key
from disagg.messages.registration import WorkerInfo


class FleetHasher:
    """Hashes prompts as the workers do; what names blocks otherwise is refused.

    Args:
        secret: ``cluster.hash_key``.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._hasher: BlockHasher | None = None

    def hasher_for(self, info: WorkerInfo) -> BlockHasher:
        """What names blocks as this worker does.

        Raises:
            ConfigError: its secret differs from this router's.
        """
        contract = info.contract
        key = block_hash_key(self._secret, contract.model_fingerprint)
        hasher = BlockHasher(key, contract.hash_block_tokens)
        if contract.hash_scheme != hasher.scheme:
            raise ConfigError(
                f"{info.incarnation.worker_id} names KV blocks by another secret than this router: "
                "both need the same cluster.hash_key (what is known of the secrets: "
                f"{contract.hash_scheme[:64]!r} there, {hasher.scheme!r} here)",
                param="cluster.hash_key",
            )
        return hasher

    def adopt(self, hasher: BlockHasher) -> None:
        """Take the first worker's; all others have the same."""
        self._hasher = self._hasher or hasher

    def hashes(self, token_ids: Sequence[int], cache_salt: bytes) -> list[bytes]:
        """Chain values of the full hash blocks; may run in any thread.

        Raises:
            RemoteFault: no worker has registered yet, so how blocks are hashed is unknown.
        """
        if self._hasher is None:
            raise RemoteFault("no worker has registered yet", retry_after_s=1)
        hashes: list[bytes] = []
        self._hasher.extend(hashes, token_ids, cache_salt)
        return hashes

    def extend(self, hashes: list[bytes], token_ids: Sequence[int], cache_salt: bytes) -> None:
        """Append the hashes of newly full blocks."""
        assert self._hasher is not None  # a request was accepted, so a worker had registered
        self._hasher.extend(hashes, token_ids, cache_salt)
