"""The peer's side of benchmarks.coordinator: one timing per line of standard input.

Runs in an environment of its own (``python -m benchmarks.coordinator --setup``) that has vLLM
without what it needs to serve; nothing of disagg is imported here.
"""

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
import types
from typing import Any

ABSENT = [
    "anthropic",
    "compressed_tensors",
    "cpuinfo",
    "cv2",
    "depyf",
    "diskcache",
    "einops",
    "fastapi",
    "gguf",
    "ijson",
    "lark",
    "uvloop",
    "librosa",
    "llguidance",
    "lmformatenforcer",
    "mcp",
    "mistral_common",
    "model_hosting_container_standards",
    "numba",
    "openai_harmony",
    "opentelemetry",
    "outlines_core",
    "partial_json_parser",
    "prometheus_client",
    "pybase64",
    "prometheus_fastapi_instrumentator",
    "python_json_logger",
    "pythonjsonlogger",
    "ray",
    "sentencepiece",
    "setproctitle",
    "soundfile",
    "tiktoken",
    "uvicorn",
    "watchfiles",
    "xgrammar",
]
"""What vLLM imports on its way to the coordinator without using it there."""

UNUSED = "vllm.parser"
"""A part of vLLM that needs real values of absent modules, and is not used there either."""


class _Inert(types.ModuleType):
    """A module whose every name is an empty class that pydantic takes for anything."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        body = {
            "__init__": lambda self, *args, **kwargs: None,
            "__get_pydantic_core_schema__": lambda *_: {"type": "any"},
        }
        made = type(name, (), body)
        setattr(self, name, made)
        return made


class _InertFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers for modules that are not installed."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Claim every module of the missing packages."""
        if fullname.split(".")[0] in self._names or fullname.startswith(UNUSED):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        """An inert module."""
        module = _Inert(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Run no code: the module is inert."""


os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("PYTHONHASHSEED", "0")
sys.meta_path.insert(0, _InertFinder({n for n in ABSENT if not importlib.util.find_spec(n)}))

import torch  # noqa: E402
import vllm  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core import kv_cache_utils  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request  # noqa: E402

BLOCK = 16
kv_cache_utils.init_none_hash(sha256)
HASHER = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)


def spec(window: int) -> Any:
    """Group spec; window 0 is full attention."""
    shape = {"block_size": BLOCK, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
    if window:
        return SlidingWindowSpec(sliding_window=window, **shape)
    return FullAttentionSpec(**shape)


def request(name: str, tokens: list[int], hasher: Any = HASHER) -> Any:
    """A request as the engine core makes it."""
    return Request(name, tokens, SamplingParams(max_tokens=4096), None, block_hasher=hasher)


class Case:
    """A manager and what a case does with it, timed by ``sample``."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.tokens = [(7 * i + 3) % 50_000 for i in range(order["tokens"])]
        windows = order["windows"]
        config = KVCacheConfig(
            num_blocks=order["blocks"],
            kv_cache_tensors=[],
            prefix_cache_retention_interval=None,
            kv_cache_groups=[KVCacheGroupSpec([str(i)], spec(w)) for i, w in enumerate(windows)],
        )
        self.kv = KVCacheManager(
            config,
            max_model_len=order["tokens"] + 8192,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
            max_in_flight_tokens=8192,
        )
        self.count = 0
        getattr(self, "prepare_" + order["case"], lambda: None)()
        self.sample = getattr(self, order["case"])

    def again(self, source: Any) -> Any:
        """Another request of the same tokens, without hashing them again."""
        self.count += 1
        made = request(f"r{self.count}", self.tokens[:1], None)
        made.prompt_token_ids = source.prompt_token_ids
        made._all_token_ids = source._all_token_ids
        made.block_hashes = source.block_hashes
        made.num_prompt_tokens = source.num_prompt_tokens
        return made

    def hash(self) -> float:
        """All block hashes of a prompt."""
        made = request("h", self.tokens, None)
        start = time.thread_time()
        HASHER(made)
        return time.thread_time() - start

    def prepare_lookup(self) -> None:
        """The cached part of the prompt was computed and freed; holes are made in windows."""
        known = request("base", self.tokens[: self.order["cached"]])
        self.kv.allocate_slots(known, len(known.all_token_ids))
        self.kv.free(known)
        every = self.order["missing_every"]
        for group, window in enumerate(self.order["windows"]) if every else ():
            if window:
                for value in known.block_hashes[::every]:
                    found = self.kv.block_pool.get_cached_block(value, [group])
                    self.kv.block_pool._maybe_evict_cached_block(found[0])
        self.asked = request("asked", self.tokens)

    def lookup(self) -> tuple[float, int]:
        """The longest prefix hit."""
        start = time.thread_time()
        hit = self.kv.get_computed_blocks(self.asked)[1]
        return time.thread_time() - start, hit

    def prepare_allocate(self) -> None:
        """A prompt that nobody has computed."""
        self.base = request("base", self.tokens)

    def allocate(self) -> float:
        """Allocate and publish the whole prompt."""
        made = self.again(self.base)
        start = time.thread_time()
        assert self.kv.allocate_slots(made, len(self.tokens)) is not None
        spent = time.thread_time() - start
        self.kv.free(made)
        self.kv.reset_prefix_cache()
        return spent

    prepare_free = prepare_allocate

    def free(self) -> float:
        """Free the whole prompt."""
        made = self.again(self.base)
        assert self.kv.allocate_slots(made, len(self.tokens)) is not None
        start = time.thread_time()
        self.kv.free(made)
        spent = time.thread_time() - start
        self.kv.reset_prefix_cache()
        return spent

    def prepare_decode(self) -> None:
        """Sequences of nearly the same length, at every offset in a block."""
        self.running = []
        for number in range(self.order["running"]):
            length = len(self.tokens) + number % BLOCK
            made = request(f"d{number}", [(number * 131 + 7 * i) % 50_000 for i in range(length)])
            assert self.kv.allocate_slots(made, length) is not None
            made.num_computed_tokens = length
            made.append_output_token_ids(1)
            self.running.append(made)

    def decode(self) -> float:
        """Steps in which every sequence ends a block once; seconds per step."""
        start = time.thread_time()
        for _ in range(BLOCK):
            self.decode_step()
        return (time.thread_time() - start) / BLOCK

    def decode_step(self) -> None:
        """Slots, publication, new tokens and their hashes."""
        self.kv.new_step_starts()
        for made in self.running:
            assert self.kv.allocate_slots(made, 1) is not None
        for made in self.running:
            made.num_computed_tokens += 1
            made.append_output_token_ids(1)


def main() -> None:
    """Answer orders: {"case": ..} builds a case, {"sample": n} times it n times."""
    answer = {"name": "vLLM", "version": vllm.__version__, "torch": torch.__version__}
    print(json.dumps(answer), flush=True)
    gc.disable()
    case: Case | None = None
    for line in sys.stdin:
        order = json.loads(line)
        if "case" in order:
            case = None
            gc.collect()
            case = Case(order)
            gc.collect()
            answer = {"ready": True}
        else:
            assert case is not None, "a sample before a case"
            answer = {"samples": [case.sample() for _ in range(order["sample"])]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
