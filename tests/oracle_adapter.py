"""Drives the coordinator from golden traces; translation only (see tests/data/oracle)."""

from typing import Any

from disagg.kv.blocks.cache_policy import CachePolicy
from disagg.kv.blocks.hits import CacheHit
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.chunked_local import ChunkedLocalSpec
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.sequence import KVSequence
from disagg.kv.shapes.layout import KVCacheLayout


def spec_of(group: dict[str, Any]) -> Spec:
    """Spec of one trace group."""
    size = group["block_size"]
    match group["type"]:
        case "full":
            return FullAttentionSpec(size, group["kv_heads"], 64, 2)
        case "swa":
            return SlidingWindowSpec(size, group["kv_heads"], 64, 2, group["window"])
        case "chunked":
            return ChunkedLocalSpec(size, group["kv_heads"], 64, 2, group["chunk"])
        case "mamba":
            return LinearStateSpec(size, 4096)
        case kind:
            raise ValueError(f"group type {kind!r} of a trace is unknown")


class Coordinator:
    """One worker's coordinator under the trace's names."""

    def __init__(self, config: dict[str, Any]) -> None:
        layout = KVCacheLayout.one_layer_per_group([spec_of(group) for group in config["groups"]])
        self.kv = KVCacheCoordinator(
            layout,
            config["num_blocks"] + 1,
            max_model_tokens=config["max_model_len"],
            max_step_tokens=config["max_step_tokens"],
            eagle_groups=range(len(layout.groups)) if config["eagle"] else (),
            policy=CachePolicy(deduplicate=False),
        )
        self.hasher = BlockHasher(b"oracle", layout.hash_block_tokens)
        self.requests: dict[str, KVSequence] = {}
        self.hit: CacheHit | None = None

    def add(self, key: str, tokens: list[int]) -> None:
        self.requests[key] = KVSequence(key)
        self.append(key, tokens)

    def append(self, key: str, tokens: list[int]) -> None:
        request = self.requests[key]
        request.token_ids += tokens
        self.hasher.extend(request.hashes, request.token_ids)

    def lookup(self, key: str) -> tuple[int, list[int]]:
        request = self.requests[key]
        self.hit = self.kv.find_longest_cache_hit(request, request.num_tokens - 1)
        return self.hit.num_tokens, [len(ids) - ids.count(0) for ids in self.hit.block_ids]

    def alloc(self, key: str, new: int, hit: int | None, ext: int, delay: bool, gate: bool) -> bool:
        kv, request = self.kv, self.requests[key]
        adopted = self.hit if hit is not None else None
        computed = kv.num_scheduled_tokens(key) if hit is None else hit + ext
        prompt = kv.admission.num_needed(key, request.num_tokens, adopted, computed, capped=True)
        if gate and prompt > kv.num_free_blocks:
            return False
        done = kv.allocate(
            request,
            num_new_tokens=new,
            hit=adopted,
            num_external_tokens=ext,
            delay_publication=delay,
        )
        if done and not delay:  # the peer publishes when it allocates
            kv.publish(key, min(kv.num_scheduled_tokens(key), request.num_tokens))
        return done

    def commit(self, key: str, computed: int) -> None:
        self.kv.commit_external(key)
        if computed == self.requests[key].num_tokens:  # its last token is computed again
            self.kv._sequences[key].num_scheduled -= 1

    def free(self, key: str) -> None:
        self.kv.free(key)
        del self.requests[key]

    def held(self, key: str) -> list[int]:
        return list(self.kv.tables.num_held(key))

    def free_blocks(self) -> int:
        return self.kv.num_free_blocks
