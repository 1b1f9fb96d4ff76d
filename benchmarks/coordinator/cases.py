"""Our side of benchmarks.coordinator: the same cases as in ``peer.py``, on the same tokens.

Times are CPU seconds of the thread, so that a busy machine disturbs neither side.
"""

import time
from typing import Any

from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.sequence import KVSequence
from disagg.kv.shapes.layout import KVCacheLayout

BLOCK = 16
HASHER = BlockHasher(b"benchmark", BLOCK)


def coordinator(windows: list[int], num_blocks: int, max_tokens: int) -> KVCacheCoordinator:
    """One group per window, 0 for full attention."""
    specs: list[Spec] = [
        SlidingWindowSpec(BLOCK, 8, 128, 2, window)
        if window
        else FullAttentionSpec(BLOCK, 8, 128, 2)
        for window in windows
    ]
    return KVCacheCoordinator(
        KVCacheLayout.one_layer_per_group(specs),
        num_blocks,
        max_model_tokens=max_tokens,
        max_step_tokens=8192,
    )


class Case:
    """A coordinator and what a case does with it, timed by ``sample``."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.tokens = [(7 * i + 3) % 50_000 for i in range(order["tokens"])]
        self.kv = coordinator(order["windows"], order["blocks"], order["tokens"] + 8192)
        self.step = 0
        getattr(self, "prepare_" + order["case"], lambda: None)()
        self.sample = getattr(self, order["case"])
        """Seconds of one run (with the tokens hit, for look-ups)."""

    def request(self, name: str, tokens: list[int]) -> KVSequence:
        """A token sequence of a case, with its hashes."""
        made = KVSequence(name, tokens)
        HASHER.extend(made.hashes, made.token_ids)
        return made

    def hash(self) -> float:
        """All block hashes of a prompt."""
        hashes: list[bytes] = []
        start = time.thread_time()
        HASHER.extend(hashes, self.tokens)
        return time.thread_time() - start

    def prepare_lookup(self) -> None:
        """The cached part of the prompt was computed and freed; holes are made in windows."""
        known = self.request("base", self.tokens[: self.order["cached"]])
        assert self.kv.allocate(known, num_new_tokens=known.num_tokens)
        self.kv.publish("base", known.num_tokens)
        self.kv.free("base")
        every = self.order["missing_every"]
        for group, window in enumerate(self.order["windows"]) if every else ():
            if window:
                holes = [self.kv.pool.cache.index(group)[value] for value in known.hashes[::every]]
                self.kv.pool.touch(holes)
                self.kv.pool.forget(holes)
                self.kv.pool.release(holes)
        self.asked = self.request("asked", list(self.tokens))

    def lookup(self) -> tuple[float, int]:
        """The longest prefix hit."""
        start = time.thread_time()
        hit = self.kv.find_longest_cache_hit(self.asked, len(self.tokens) - 1)
        return time.thread_time() - start, hit.num_tokens

    def prepare_allocate(self) -> None:
        """A prompt that nobody has computed."""
        self.base = self.request("base", self.tokens)

    def allocate(self) -> float:
        """Allocate and publish the whole prompt."""
        start = time.thread_time()
        assert self.kv.allocate(self.base, num_new_tokens=len(self.tokens))
        self.kv.publish("base", len(self.tokens))
        spent = time.thread_time() - start
        self.kv.free("base")
        self.kv.pool.clear_cache()
        return spent

    prepare_free = prepare_allocate

    def free(self) -> float:
        """Free the whole prompt."""
        assert self.kv.allocate(self.base, num_new_tokens=len(self.tokens))
        self.kv.publish("base", len(self.tokens))
        start = time.thread_time()
        self.kv.free("base")
        spent = time.thread_time() - start
        self.kv.pool.clear_cache()
        return spent

    def prepare_decode(self) -> None:
        """Sequences of nearly the same length, at every offset in a block."""
        self.running = []
        for number in range(self.order["running"]):
            length = len(self.tokens) + number % BLOCK
            made = self.request(
                f"d{number}", [(number * 131 + 7 * i) % 50_000 for i in range(length)]
            )
            assert self.kv.allocate(made, num_new_tokens=length)
            self.kv.publish(made.key, length)
            made.token_ids.append(1)
            self.running.append(made)

    def decode(self) -> float:
        """Steps in which every sequence ends a block once; seconds per step."""
        start = time.thread_time()
        for _ in range(BLOCK):
            self.decode_step()
        return (time.thread_time() - start) / BLOCK

    def decode_step(self) -> None:
        """As Batcher and WorkerCore do it: slots, holds, publication, new tokens and hashes."""
        kv, running, extend = self.kv, self.running, HASHER.extend
        self.step += 1
        assert kv.allocate_decodes(running) == len(running)
        kv.hold_step(self.step, [made.key for made in running])
        kv.release_step(self.step)
        kv.publish_step([(made.key, len(made.token_ids)) for made in running])
        for made in running:
            tokens = made.token_ids
            tokens.append(1)
            if len(tokens) % BLOCK == 0:
                extend(made.hashes, tokens)
