"""The KV coordinator beside vLLM's, in one run: ``python -m benchmarks.coordinator``.

Both sides are sampled in turn; a line of JSON per figure has both medians and their ratio
(peer / ours, higher is better). ``--setup`` first creates the peer's environment. The bookkeeping
of a whole decode step has no peer; ``--steps`` measures it alone, without that environment.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from benchmarks.coordinator.cases import Case
from benchmarks.coordinator.environment import Peer, set_up
from benchmarks.coordinator.step import CASES, QUICK_CASES, WINDOWS, measure_steps

TOKENS = 131_072
FULL, WINDOW = 0, 1024
GROUPS = {1: [FULL], 2: [FULL, WINDOW], 3: [FULL, WINDOW, 512], 4: [FULL, WINDOW, 512, 2048]}

Order = dict[str, Any]


def order(case: str, windows: list[int], tokens: int = TOKENS, **more: Any) -> Order:
    """A case as both sides understand it."""
    blocks = more.pop("blocks", 40_000)
    return {"case": case, "windows": windows, "tokens": tokens, "blocks": blocks, **more}


def lookup(windows: list[int], cached: int = TOKENS, missing_every: int = 0) -> Order:
    """A look-up of the prompt of which ``cached`` tokens are there."""
    return order("lookup", windows, cached=cached, missing_every=missing_every)


def cases() -> list[tuple[str, float, Order]]:
    """Name, target ratio and order of each figure."""
    found: list[tuple[str, float, Order]] = [
        ("hash 128k tokens", 3, order("hash", [FULL])),
        ("full hit 128k", 10, lookup([FULL])),
        ("full + window hit 128k", 10, lookup([FULL, WINDOW])),
        ("window, every 8th block missing", 50, lookup([WINDOW], missing_every=8)),
        (
            "full + window, every 8th window block missing",
            50,
            lookup([FULL, WINDOW], missing_every=8),
        ),
        ("miss after 64k common tokens, full", 10, lookup([FULL], TOKENS // 2)),
        ("miss after 64k common tokens, full + window", 10, lookup([FULL, WINDOW], TOKENS // 2)),
    ]
    for number, windows in GROUPS.items():
        name = f"allocate + publish 128k, {number} groups"
        found.append((name, 8, order("allocate", windows)))
    for number, windows in GROUPS.items():
        found.append((f"free 128k, {number} groups", 3, order("free", windows)))
    for number in (1, 2):
        decode = order("decode", GROUPS[number], 2048, running=256, blocks=200_000)
        found.append((f"slots + publication of 256 decodes, {number} groups", 5, decode))
    return found


def growth() -> list[tuple[str, Order]]:
    """What grows with prompt length, groups and pool size."""
    found = []
    for tokens in (8_192, 32_768, 131_072):
        cached = {"cached": tokens, "missing_every": 0}
        found.append((f"hit, {tokens} tokens", order("lookup", GROUPS[2], tokens, **cached)))
        found.append((f"allocate + publish, {tokens} tokens", order("allocate", GROUPS[2], tokens)))
    for number, windows in GROUPS.items():
        cached = {"cached": 32_768, "missing_every": 0}
        found.append((f"hit 32k, {number} groups", order("lookup", windows, 32_768, **cached)))
    for blocks in (20_000, 200_000, 1_000_000):
        made = order("allocate", GROUPS[2], 32_768, blocks=blocks)
        found.append((f"allocate + publish 32k, pool of {blocks} blocks", made))
    return found


def measure(peer: Peer, wanted: Order, num_samples: int) -> tuple[float, float]:
    """Medians in ms, ours and the peer's, sampled in turn after one unmeasured run each."""
    ours = Case(wanted)
    peer.prepare(wanted)
    gc.collect()
    gc.disable()  # as the peer does: no sample pays for a collection
    samples: tuple[list[float], list[float]] = ([], [])
    for number in range(num_samples + 1):
        pair = ours.sample(), peer.sample()
        if wanted["case"] == "lookup":
            if pair[0][1] != pair[1][1]:
                sys.exit(f"hits differ: {pair[0][1]} and {pair[1][1]} tokens in {wanted}")
            pair = pair[0][0], pair[1][0]
        if number:
            samples[0].append(pair[0])
            samples[1].append(pair[1])
    gc.enable()
    return statistics.median(samples[0]) * 1e3, statistics.median(samples[1]) * 1e3


def report(name: str, ours: float, peer: float | None, **more: Any) -> bool:
    """Print one figure; returns whether it reached its target, if it has one."""
    line: dict[str, Any] = {"name": name, "ours": round(ours, 4), "peer": peer and round(peer, 4)}
    more["note"] += f", load average {os.getloadavg()[0]:.1f}"
    print(json.dumps(line | more), flush=True)
    return more["ok"] is not False


def measure_whole_steps(*, quick: bool) -> None:
    """Print what the control thread spends on a step, by batch and context."""
    num_samples = 5 if quick else 21
    for num_sequences, num_tokens in QUICK_CASES if quick else CASES:
        pairs = measure_steps(num_sequences, num_tokens, num_samples)
        whole = [before + after for before, after in pairs]
        until, after = (statistics.median(side) for side in zip(*pairs, strict=True))
        report(
            f"whole decode step, {num_sequences} sequences of {num_tokens:,} tokens",
            statistics.median(whole),
            None,
            unit="ms CPU",
            ratio=None,
            target=None,
            ok=None,
            peer_name=None,
            note=f"{len(WINDOWS)} groups; until the launch {until:.2f}, from the result on "
            f"{after:.2f}; median of {num_samples}, {min(whole):.2f} to {max(whole):.2f}",
        )


def main() -> int:
    """Run all cases, the growth table and the memory figure; 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setup", action="store_true", help="create the peer's environment")
    parser.add_argument("--quick", action="store_true", help="five samples, no growth table")
    parser.add_argument("--steps", action="store_true", help="whole decode steps only; no peer")
    chosen = parser.parse_args()
    if chosen.setup:
        set_up()
        return 0
    measure_whole_steps(quick=chosen.quick)
    if chosen.steps:
        return 0
    num_samples = 5 if chosen.quick else 21
    reached = True
    with Peer() as peer:
        for name, target, wanted in cases():
            ours, theirs = measure(peer, wanted, num_samples)
            ratio = round(theirs / ours, 2)
            reached &= report(
                name,
                ours,
                theirs,
                unit="ms CPU",
                ratio=ratio,
                target=target,
                ok=ratio >= target,
                peer_name=peer.name,
                note=f"median of {num_samples}, alternating",
            )
        for name, wanted in [] if chosen.quick else growth():
            ours, theirs = measure(peer, wanted, 5)
            ratio = round(theirs / ours, 2)
            note = "growth table: median of 5, alternating"
            report(
                name,
                ours,
                theirs,
                unit="ms CPU",
                ratio=ratio,
                target=None,
                ok=None,
                peer_name=peer.name,
                note=note,
            )
    blocks = 200_000 if chosen.quick else 1_000_000
    command = [sys.executable, "-m", "benchmarks.coordinator.memory", str(blocks)]
    used = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    reached &= report(
        f"bookkeeping of a pool of {blocks} cached blocks",
        used,
        None,
        unit="bytes per block",
        ratio=None,
        target=None if chosen.quick else 250,  # half-filled tables weigh more in a small pool
        ok=None if chosen.quick else used <= 250,
        peer_name=None,
        note="growth of the process's resident memory, chain values and block ids included",
    )
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
