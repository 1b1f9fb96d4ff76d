"""Hit rates of what a prefix cache may keep: ``python -m benchmarks.retention``.

Retention, deduplication and eviction (`cache.*`) over workloads, seeds and pool pressures, beside
vLLM's KV cache manager with its own default (sparse) and dense, in as many blocks. All serve the
same requests in the same order, 8 at once, prompts in chunks of a step of 2,048 tokens. Pressure is
what all requests' tokens would take if every block of every group were kept, divided by the pool.

A figure is the share of prompt tokens that were found. The last lines are means per workload and
over all, and the difference of each policy to the default, seed by seed: least and most.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.retention.ours import BLOCK, OurCache
from benchmarks.retention.replay import STEP_TOKENS, Played, replay
from benchmarks.retention.workloads import Request, workload
from benchmarks.servers import environment
from disagg.kv.blocks.cache_policy import CachePolicy
from disagg.kv.blocks.retention import Retention

WINDOWS = [1024, 1024, 1024]
PRESSURES = (48, 24, 12, 6, 3)
SEEDS = (1, 2, 3, 4, 5)
DEFAULT = "dense, segmented_lru"
POLICIES = {
    DEFAULT: CachePolicy(eviction="segmented_lru"),
    "dense, segmented_lru, copies": CachePolicy(eviction="segmented_lru", deduplicate=False),
    "sparse, segmented_lru": CachePolicy(retention=Retention(0), eviction="segmented_lru"),
    "dense, lru": CachePolicy(),
    "dense, lru, copies": CachePolicy(deduplicate=False),
    "sparse, lru": CachePolicy(retention=Retention(0)),
    "sparse, lru, every 4096": CachePolicy(retention=Retention(4096)),
}
PEERS: dict[str, int | None] = {"vLLM sparse (its default)": 0, "vLLM dense": None}
COMMAND = "benchmarks.retention"


class Peer:
    """vLLM's manager in a process of its environment."""

    def __init__(self, python: Path) -> None:
        environment.check_python(python, COMMAND, "; or leave it out: --ours")
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.retention.peer"],
            cwd=environment.ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.release = self._answer()

    def play(self, **order: Any) -> Played:
        """One replay there."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return Played(**self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # vLLM logs there too
                found: dict[str, Any] = json.loads(line)
                return found
        sys.exit("the peer's process has ended; its message is above")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def num_blocks_of(requests: list[Request], pressure: float) -> int:
    """Blocks of a pool under this pressure, and at least what the longest request needs."""
    tokens = [len(request.prompt) + request.num_answer for request in requests]
    groups = 1 + len(WINDOWS)
    window_blocks = sum(-(-(window + STEP_TOKENS) // BLOCK) + 2 for window in WINDOWS)
    least = max(tokens) // BLOCK + 2 + window_blocks
    return max(least, int(sum(tokens) * groups / BLOCK / pressure)) + 1


def play(requests: list[Request], num_blocks: int, policy: CachePolicy) -> Played:
    """One replay of ours."""
    return replay(OurCache(num_blocks, WINDOWS, policy, STEP_TOKENS), requests)


def measure(
    name: str, num_requests: int, seed: int, pressures: tuple[float, ...], peer: Peer | None
) -> dict[str, list[float]]:
    """Print a line per pool; returns the hit rates per policy."""
    requests = workload(name, num_requests, seed)
    rates: dict[str, list[float]] = defaultdict(list)
    for pressure in pressures:
        blocks = num_blocks_of(requests, pressure)
        played = {label: play(requests, blocks, policy) for label, policy in POLICIES.items()}
        for label, interval in PEERS.items() if peer else ():
            assert peer is not None
            played[label] = peer.play(
                workload=name,
                requests=num_requests,
                seed=seed,
                blocks=blocks,
                windows=WINDOWS,
                interval=interval,
            )
        for label, one in played.items():
            rates[label].append(one.hit_rate)
        line = {"workload": name, "seed": seed, "pressure": pressure, "blocks": blocks}
        shown = {label: round(one.hit_rate, 4) for label, one in played.items()}
        counts = {label: one.preemptions for label, one in played.items() if one.preemptions}
        print(json.dumps({**line, "hit rate": shown, "preemptions": counts}), flush=True)
    return rates


def summary(rates: dict[tuple[str, int], dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Means per workload and over all; the differences to the default over the seeds."""
    lines = []
    for name in [*dict.fromkeys(name for name, _ in rates), "all"]:
        chosen = {key: found for key, found in rates.items() if name in (key[0], "all")}
        for label in next(iter(chosen.values())):
            means = [mean(found[label]) for found in chosen.values()]
            gains = [mean(found[label]) - mean(found[DEFAULT]) for found in chosen.values()]
            lines.append(
                {
                    "workload": name,
                    "policy": label,
                    "mean": round(mean(means), 4),
                    "over the default": [round(min(gains), 4), round(max(gains), 4)],
                }
            )
    return lines


def main() -> None:
    """Print a line per pool, then the means."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--workloads", nargs="+", default=["shared", "mooncake"])
    parser.add_argument("--trace", help="a trace in Mooncake's format, besides the workloads")
    parser.add_argument("--ours", action="store_true", help="without the peer")
    parser.add_argument(
        "--python", type=Path, default=environment.PYTHON, help="peer's interpreter"
    )
    parser.add_argument("--setup", action="store_true", help="make the peer's environment")
    parser.add_argument("--quick", action="store_true", help="30 requests, 1 seed, 2 pressures")
    chosen = parser.parse_args()
    if chosen.setup:
        environment.set_up()
        return
    peer = None if chosen.ours else Peer(chosen.python)
    if peer is not None:
        print(json.dumps({"peer": peer.release}), flush=True)
    seeds = chosen.seeds[:1] if chosen.quick else chosen.seeds
    pressures = (12.0, 3.0) if chosen.quick else PRESSURES
    num_requests = 30 if chosen.quick else chosen.requests
    cases = [(name, seed) for name in chosen.workloads for seed in seeds]
    cases += [(chosen.trace, 0)] if chosen.trace else []
    rates = {case: measure(case[0], num_requests, case[1], pressures, peer) for case in cases}
    for line in summary(rates):
        print(json.dumps(line), flush=True)
    if peer is not None:
        peer.close()


if __name__ == "__main__":
    main()
