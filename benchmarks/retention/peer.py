"""vLLM's KV cache manager as a cache of the benchmark; runs in its environment.

``python -m benchmarks.retention.peer`` reads one order a line: workload, requests, seed, blocks,
windows, interval (null: dense); it prints what was found.
"""

import dataclasses
import json
import os
import sys
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("PYTHONHASHSEED", "0")

import torch
import vllm
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request as VllmRequest

from benchmarks.retention.replay import STEP_TOKENS, replay
from benchmarks.retention.workloads import Request, answer_of, workload

BLOCK = 16
MAX_TOKENS = 1 << 18
kv_cache_utils.init_none_hash(sha256)
HASHER = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)


class PeerCache:
    """A manager with one full group and windows, asked as vLLM's scheduler asks it."""

    def __init__(self, num_blocks: int, windows: list[int], interval: int | None) -> None:
        shape = {"block_size": BLOCK, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
        specs: list[Any] = [FullAttentionSpec(**shape)]
        specs += [SlidingWindowSpec(sliding_window=window, **shape) for window in windows]
        config = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            prefix_cache_retention_interval=interval,
            kv_cache_groups=[KVCacheGroupSpec([str(i)], spec) for i, spec in enumerate(specs)],
        )
        self._kv = KVCacheManager(
            config,
            max_model_len=MAX_TOKENS,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
            max_in_flight_tokens=STEP_TOKENS,
        )
        self._requests: dict[int, Any] = {}
        self._num_begun = 0

    def begin(self, number: int, request: Request) -> int | None:
        """See `Cache`: the first chunk is allocated at once, as the hit is not held before."""
        self._num_begun += 1
        made = VllmRequest(
            f"{number}-{self._num_begun}",
            request.prompt,
            SamplingParams(max_tokens=request.num_answer),
            None,
            block_hasher=HASHER,
        )
        blocks, hit, made.shared_prefix_boundary = self._kv.get_computed_blocks(made)
        taken = self._kv.allocate_slots(
            made, 1, hit, blocks, full_sequence_must_fit=True, has_scheduled_reqs=False
        )
        if taken is None:
            return None
        made.num_computed_tokens = hit
        self._requests[number] = made
        return int(hit)

    def compute(self, number: int, num_new: int) -> bool:
        """See `Cache`."""
        made = self._requests[number]
        if self._kv.allocate_slots(made, num_new) is None:
            return False
        made.num_computed_tokens += num_new
        return True

    def answer(self, number: int, num_new: int) -> bool:
        """See `Cache`: the tokens are appended before they are computed, as in a step each."""
        made = self._requests[number]
        num_answered = len(made.output_token_ids)
        lacking = made.num_computed_tokens + num_new - made.num_tokens
        for token in answer_of(number, num_answered + lacking)[num_answered:]:
            made.append_output_token_ids(token)
        if self._kv.allocate_slots(made, num_new) is None:
            return False
        made.num_computed_tokens += num_new
        return True

    def end(self, number: int) -> None:
        """See `Cache`."""
        self._kv.free(self._requests.pop(number))


def main() -> None:
    """Answer orders until there are no more."""
    print(json.dumps({"name": "vLLM", "version": vllm.__version__}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        requests = workload(order["workload"], order["requests"], order["seed"])
        cache = PeerCache(order["blocks"], order["windows"], order["interval"])
        print(json.dumps(dataclasses.asdict(replay(cache, requests))), flush=True)


if __name__ == "__main__":
    main()
