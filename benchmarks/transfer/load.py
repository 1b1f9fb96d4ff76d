"""What pulling costs the engine of the reader: step times beside those of plain copying.

The reader runs the real engine over a random checkpoint made for it; four sequences decode
without end. In turn: nothing else, pulls from an owner, a plain thread that copies as many bytes.
"""

import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.transfer.figures import MS, figure
from benchmarks.transfer.node import Node
from benchmarks.transfer.pair import Pair
from benchmarks.transfer.plan import NodePlan
from benchmarks.transfer.raw import RawOwner, RawReader
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.messages.submit import Role

MIB = 1 << 20
KV_HEADS, HEAD_SIZE, LAYERS = 4, 128, 4
PULL_BYTES = 32 * MIB
BLOCK_BYTES = LAYERS * 2 * 16 * KV_HEADS * HEAD_SIZE * 4
PULL_EVERY_S = 0.05
NUM_DECODES = 4
CASES = ("pulls", "copies", "raw", "idle")
RAW = {"num_bytes": PULL_BYTES, "shape": "16 MiB descriptors"}
PEERS = {
    "copies": "the same bytes copied by a plain thread",
    "raw": "raw NIXL READs of the same bytes by a plain thread",
    "idle": "no transfer",
}
PROMPT_TOKENS = 64


def make_checkpoint(path: Path) -> None:
    """Write a random Qwen3 with blocks of 256 KiB; the engine reads no tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=LAYERS,
        num_attention_heads=KV_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=65_536,
        eos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_text("{}")


class PlainCopies:
    """A thread that copies at a given rate."""

    def __init__(self, node: Node) -> None:
        device = node.pool.device
        self._from = torch.full((PULL_BYTES,), 1, dtype=torch.int8, device=device)
        self._to = torch.full((PULL_BYTES,), 2, dtype=torch.int8, device=device)

    def run(self, times: int, seconds: float) -> None:
        """Copy ``PULL_BYTES`` so many times, spread evenly; returns when the time is over."""
        thread = threading.Thread(target=self._copy, args=(times, seconds), name="copies")
        thread.start()
        thread.join(10 * seconds)

    def _copy(self, times: int, seconds: float) -> None:
        begin_s = time.monotonic()
        for number in range(times):
            time.sleep(max(0.0, begin_s + number * seconds / times - time.monotonic()))
            for start in range(0, PULL_BYTES, 8 * MIB):
                piece = slice(start, start + 8 * MIB)
                self._to[piece].copy_(self._from[piece])
        time.sleep(max(0.0, begin_s + seconds - time.monotonic()))


def measure(rounds: int, seconds: float, device: str) -> bool:
    """Print step times and rates; whether the target was reached."""
    spec = FullAttentionSpec(16, KV_HEADS, HEAD_SIZE, 4)
    blocks = 16 * PULL_BYTES // BLOCK_BYTES
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder))
        plan = NodePlan("", (spec,) * LAYERS, blocks, writes=False, device=device)
        with Pair(plan, model_dir=folder) as pair:
            info = pair.extra(pair.owner, RawOwner, "info")
            pair.extra(pair.reader, RawReader, "connect", info=info)
            return _rounds(pair, rounds, seconds, device)


def _rounds(pair: Pair, rounds: int, seconds: float, device: str) -> bool:
    tokens = PULL_BYTES // BLOCK_BYTES * 16
    found: dict[str, list[tuple[float, float]]] = {case: [] for case in CASES}
    num_pulls: list[int] = []
    for number in range(rounds + 1):
        turn = number % len(CASES)
        for case in CASES[turn:] + CASES[:turn]:
            if case == "copies" and not num_pulls:
                continue  # they follow the pulls' rate
            decodes = _start_decodes(pair)
            pair.reader.call("take_steps")
            if case == "pulls":
                num_pulls.append(_every(seconds, lambda: pair.pull(tokens, check=False)))
            elif case == "raw":
                _every(seconds, lambda: pair.extra(pair.reader, RawReader, "read_s", **RAW))
            elif case == "copies":
                copy = {"times": num_pulls[-1], "seconds": seconds}
                pair.extra(pair.reader, PlainCopies, "run", **copy)
            else:
                time.sleep(seconds)
            steps = pair.reader.call("take_steps")
            for decode in decodes:
                pair.reader.call("cancel", number=decode)
            if number:  # the first round warms up
                found[case].append(_medians(steps))
    rate = sum(num_pulls) * PULL_BYTES / MIB / seconds / len(num_pulls)
    note = (
        f"real engine on {device}, random Qwen3 of {LAYERS} layers, {NUM_DECODES} sequences "
        "decode, 1 thread; "
        f"{rate:.0f} MiB/s pulled in {PULL_BYTES // MIB} MiB pulls, copied by a plain thread; "
        f"medians of {seconds:g} s"
    )
    step, every = ({k: [pair[i] * MS for pair in v] for k, v in found.items()} for i in (0, 1))
    reached = _print("engine step while pulling", step, "copies", 1 / 1.1, note)
    for peer in ("raw", "idle"):
        _print(f"engine step while pulling, to {peer}", step, peer, None, note)
    for peer in PEERS:
        _print(f"step begin to step begin while pulling, to {peer}", every, peer, None, note)
    return reached


def _print(
    name: str, found: dict[str, list[float]], peer: str, target: float | None, note: str
) -> bool:
    return figure(
        name,
        found["pulls"],
        found[peer],
        unit="ms",
        target=target and round(target, 3),
        peer_name=PEERS[peer],
        note=note,
    )


def _start_decodes(pair: Pair) -> list[int]:
    """Let sequences decode, from the same context each time; returns their numbers."""
    decodes = [pair.new_number() for _ in range(NUM_DECODES)]
    for decode in decodes:
        request = {"num_tokens": PROMPT_TOKENS, "max_tokens": 30_000, "peer": None}
        pair.reader.call("submit", number=decode, role=Role.LOCAL, **request)
    for decode in decodes:
        pair.reader.call("wait_decodable", number=decode)
    return decodes


def _medians(steps: list[tuple[float, float]]) -> tuple[float, float]:
    """Median step time and median time from begin to begin, in s."""
    if len(steps) < 10:
        raise RuntimeError(f"only {len(steps)} engine steps were seen")
    begins = [begin for begin, _ in steps]
    return (
        statistics.median(end - begin for begin, end in steps),
        statistics.median(b - a for a, b in pairwise(begins)),
    )


def _every(seconds: float, work: Callable[[], object]) -> int:
    """Work every `PULL_EVERY_S` as long as there is time; returns how often."""
    begin_s, number = time.monotonic(), 0
    while (now_s := time.monotonic()) < begin_s + seconds:
        time.sleep(max(0.0, begin_s + number * PULL_EVERY_S - now_s))
        work()
        number += 1
    return number
