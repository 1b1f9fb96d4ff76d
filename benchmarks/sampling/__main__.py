"""Sampling a batch beside taking its best tokens, and beside sorting every row.

``python -m benchmarks.sampling [--quick]``: CPU time of the production sampler for 16 rows of
32,000 and 262,144 logits, one thread. Target: at most twice what the same sampler takes for greedy
rows. The other peer is the usual way in torch (sort each row, cut, renormalise, draw). The cases
take turns in every round; the figure is the least of the rounds.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.sampling.cases import BURST, CASES, GREEDY, Case, batch, by_sorting, least_ms
from benchmarks.transfer.figures import load
from disagg.workers.engines.sampler import sample

VOCABULARIES = (32_000, 262_144)
ROUNDS, QUICK_ROUNDS = 24, 4
SORTED = ", sorted"
TARGET = 0.5
"""Greedy to sampled: at most twice its time."""


def figures(vocab_size: int, rounds: int) -> Iterator[dict[str, object]]:
    """Two figures per case: beside greedy, which has the target, and beside sorting."""
    runs: dict[str, Callable[[], object]] = {}
    for case in (GREEDY, *CASES):
        logits, params = batch(case, vocab_size)
        positions = range(1_000, 1_000 + len(params))
        runs[case.name] = partial(sample, logits, params, positions)
        runs[case.name + SORTED] = partial(by_sorting, logits, params)
    spent = least_ms(runs, rounds, seldom=SORTED)
    for case in CASES:
        yield figure(case, vocab_size, rounds, spent, GREEDY.name, TARGET)
        yield figure(case, vocab_size, rounds, spent, case.name + SORTED, None)


def figure(
    case: Case,
    vocab_size: int,
    rounds: int,
    spent: dict[str, tuple[float, float]],
    peer: str,
    target: float | None,
) -> dict[str, object]:
    """A line; a ratio above 1 is better than the peer."""
    ours, median = spent[case.name]
    ratio = round(spent[peer][0] / ours, 3)
    return {
        "name": f"sampling/{vocab_size}/{case.name}/to {'sorted' if target is None else 'greedy'}",
        "ours": round(ours, 3),
        "peer": round(spent[peer][0], 3),
        "unit": "ms of CPU per 16 rows",
        "ratio": ratio,
        "target": target,
        "ok": None if target is None else ratio >= target,
        "peer_name": "sorting every row with torch" if target is None else "greedy, same sampler",
        "note": f"least of {rounds} rounds of {BURST} calls (median {median:.3g}), in turn; "
        f"1 thread; torch {torch.__version__}; {load()}",
    }


def main() -> int:
    """Print the figures; the exit code is 1 if one misses its target."""
    parser = argparse.ArgumentParser(prog="benchmarks.sampling", description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds")
    given = parser.parse_args()
    torch.set_num_threads(1)
    reached = True
    with torch.inference_mode():
        for vocab_size in VOCABULARIES:
            for line in figures(vocab_size, QUICK_ROUNDS if given.quick else ROUNDS):
                print(json.dumps(line), flush=True)
                reached &= line["ok"] is not False
    return 0 if reached else 1


if __name__ == "__main__":
    raise SystemExit(main())
