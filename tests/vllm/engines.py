"""vLLM engines over tiny checkpoints; vLLM is imported when the first one is made."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disagg.errors import ConfigError
from disagg.testing.scripted_worker import HASH_KEY
from disagg.workers.options import WorkerOptions

if TYPE_CHECKING:
    from disagg.workers.engines.vllm.vllm_engine import VllmEngine

BLOCK_TOKENS = 32
"""The least that vLLM's attention on the CPU takes, and so what it gets where nobody says."""
HEAD_SIZE = 32
"""And its least heads."""
VLLM_SHAPE: dict[str, Any] = {"head_dim": HEAD_SIZE}


def vllm_options(model_dir: Path, num_blocks: int, **changed: Any) -> WorkerOptions:
    """Of a worker of both roles, as the tests' checkpoints need them."""
    given: dict[str, Any] = {
        "engine": "vllm",
        "device": "cpu",
        "dtype": "float32",
        "num_threads": 1,
        "num_blocks": num_blocks,
        "max_model_tokens": 1024,
        "max_step_tokens": 512,
        "max_sequences": 8,
        "hash_key": HASH_KEY,
    }
    return WorkerOptions("w", "both", str(model_dir), "tiny", (), **(given | changed))


def shared_memory(pids: Iterable[int]) -> set[str]:
    """What processes share of vLLM's, by name; "(deleted)" is behind one whose name is gone."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    return set(re.findall(r"/dev/shm/((?:psm_|\S+-cpushm).*)", maps))


def make_vllm(model_dir: Path, num_blocks: int, **changed: Any) -> "VllmEngine":
    """Load a checkpoint into vLLM, in this process; on the CPU unless a device is named."""
    from disagg.workers.engines.vllm import start
    from disagg.workers.engines.vllm.vllm_engine import build_vllm

    start.set_environment(changed.get("device", "cpu"), 1)
    from vllm.distributed import parallel_state

    # A model without experts, before this in the process, has made too few of vLLM's groups.
    made = {
        name: group
        for name, group in vars(parallel_state).items()
        if isinstance(group, parallel_state.GroupCoordinator) and name != "_WORLD"
    }
    vars(parallel_state).update(dict.fromkeys(made))
    try:
        return build_vllm(vllm_options(model_dir, num_blocks, **changed))
    except ConfigError:  # the engines before this one go on
        vars(parallel_state).update(made)
        raise
