"""A plain vLLM engine that publishes KV events: ``python -m tests.vllm.plain_server OPTIONS_JSON``.

Reads one JSON object per line, ``{"token_ids": [...], "cache_salt": "", "num_tokens": 1}``, or a
list of them that run at once, and answers with how many tokens of each vLLM found in its cache;
``reset`` empties that.
"""

import json
import os
import sys
from typing import Any

os.environ |= {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


def serve(given: dict[str, Any]) -> None:
    """Answer what is asked until the input ends."""
    from vllm import LLM, SamplingParams

    # Another process ends first, and its messages are for whoever reads this one's.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    llm = LLM(
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        enable_prefix_caching=True,
        disable_hybrid_kv_cache_manager=False,
        **given,
    )
    print("ready", file=answers)
    for line in sys.stdin:
        if line.strip() == "reset":
            print(json.dumps(llm.reset_prefix_cache()), file=answers)
            continue
        asked = json.loads(line)
        prompts = [
            {"prompt_token_ids": one["token_ids"]}
            | ({"cache_salt": one["cache_salt"]} if one.get("cache_salt") else {})
            for one in asked
        ]
        sampling = [
            SamplingParams(max_tokens=one.get("num_tokens", 1), temperature=0, ignore_eos=True)
            for one in asked
        ]
        found = llm.generate(prompts, sampling, use_tqdm=False)
        print(json.dumps([one.num_cached_tokens for one in found]), file=answers)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
