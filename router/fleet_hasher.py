"""How workers name KV blocks, as this router must: by its secret and their contract."""

from disagg.errors import ConfigError
from disagg.kv.hashing import BlockHasher, block_hash_key
from disagg.messages.registration import WorkerInfo
from disagg.routing.revisions import HashExtend


class FleetHasher:
    """Hashes prompts as workers do; who names blocks otherwise is refused.

    Args:
        secret: ``cluster.hash_key``.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret

    def hasher_of(self, info: WorkerInfo) -> HashExtend:
        """What names blocks as this worker does; may be used in any thread.

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
        return hasher.extend
