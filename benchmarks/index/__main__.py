"""The router's prefix index beside Dynamo's RadixTree: ``python -m benchmarks.index``.

A prompt of 131,072 tokens, blocks of 16 and 64, 10 to 1,000 workers that hold all of it, random
beginnings and something of their own after them, or (all but one) other prompts; prompts that grow
by one block per event; prompts that come and go. Each case runs in a fresh process per side, one
step of each by turns, and both must find the same blocks. Figures of a look-up: CPU time until it
is known which workers hold how much, with fresh digests each time, which are made and freed outside
of it; ratio: peer / ours, higher is better. Layouts with windows, chunks and states have no peer:
they are held against ours with full attention alone, in the same turns, where all groups hold the
same and, *of ends only*, where the others hold what a query at each worker's end needs. A decision
is all that the router does between a request of that length (*nothing*: of 100 tokens) and its
submits; *tiers*: partly, and each worker has a tier: empty, with the same blocks as its pool, with
more, with the whole prompt, that of three workers alone, or all that there is, as pools have lost
it. *By estimated*: workers and links have been measured, so that plans are compared by their times.
``--decisions`` measures these alone.
``--setup`` first creates the peer's environment.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.index.environment import PEER, run, set_up
from benchmarks.index.turns import Answer, Order, by_turns
from benchmarks.index.workload import SHAPES

HYBRIDS = ("full + window 1024", "full + chunks 8192", "full + state")
WITHOUT_FULL = ("window 1024", "window 1024 + state", "state")
TIERS = ("empty", "same", "more", "whole", "few", "alone")
BYTES_MAX = 64
DECISION_MS_MAX = 1.0


def report(name: str, unit: str, ours: float, peer: float | None, **more: Any) -> bool:
    """Print one figure; returns whether it reached its target, if it has one."""
    line = {"name": name, "unit": unit, "ours": round(ours, 3), "peer": peer and round(peer, 3)}
    note = f"{more.pop('note', '')}; load average {os.getloadavg()[0]:.1f}".lstrip("; ")
    print(json.dumps(line | more | {"note": note}), flush=True)
    return more.get("ok") is not False


def beside_the_peer(name: str, order: Order, hybrids: Sequence[str] = ()) -> bool:
    """One case by both sides, and by ours with other kinds beside full attention."""
    layouts: list[Order] = [{"groups": hybrid} for hybrid in hybrids]
    if order["shape"] == "partly":
        layouts += [one | {"ends": True} for one in layouts]
    sides = [("ours", order), ("peer", order)]
    ours, peer, *others = by_turns([*sides, *(("ours", order | one) for one in layouts)])
    if [ours[key] for key in ("found_blocks", "num_found")] != [
        peer[key] for key in ("found_blocks", "num_found")
    ]:
        sys.exit(f"the two sides find different blocks in {order}: {ours}, {peer}")
    reached, num = True, order["samples"]
    ratio = round(peer["ms"] / ours["ms"], 2)
    reached &= report(
        f"look-up, {name}",
        "ms CPU",
        ours["ms"],
        peer["ms"],
        ratio=ratio,
        target=1.0,
        ok=ratio >= 1.0,
        peer_name=PEER,
        note=f"median of {num}; the first one {ours['first_ms']:.3f}; "
        f"as a dict of all workers {ours['every_worker_ms']:.3f}",
    )
    reached &= report(
        f"memory, {name}",
        "bytes per (worker, block)",
        held_bytes(ours),
        peer["grown_bytes"] / ours["num_held"],
        ratio=None,
        target=BYTES_MAX,
        ok=held_bytes(ours) <= BYTES_MAX,
        peer_name=PEER,
        note="growth of the process's resident memory",
    )
    mine, theirs = ours["blocks_per_s"] / 1e6, peer["blocks_per_s"] / 1e6
    report(
        f"events, {name}",
        "M blocks/s of CPU",
        mine,
        theirs,
        ratio=round(mine / theirs, 2),
        target=None,
        ok=None,
        peer_name=PEER,
        note="the peer parses JSON within it",
    )
    for layout, hybrid in zip(layouts, others, strict=True):
        if layout.get("ends") and hybrid["found_blocks"] != ours["found_blocks"]:
            sys.exit(f"workers that hold what their ends need go on elsewhere: {layout}, {order}")
        what = f"{layout['groups']}{' of ends only' if layout.get('ends') else ''}"
        reached &= beside_full(f"{what}, {name}", hybrid, ours)
    return reached


def beside_full(name: str, hybrid: Answer, full: Answer) -> bool:
    """A layout with another kind beside full attention alone."""
    ratio = round(hybrid["ms"] / full["ms"], 2)
    return report(
        f"look-up, {name}",
        "ms CPU",
        hybrid["ms"],
        None,
        full_ms=round(full["ms"], 3),
        times_full=ratio,
        target=2.0,
        ok=ratio <= 2.0,
        note=f"{held_bytes(hybrid):.1f} bytes per (worker, block)",
    )


def held_bytes(answer: Answer) -> float:
    """Memory per (worker, block)."""
    return float(answer["grown_bytes"] / answer["num_held"])


def out_of_order(workers: int, samples: int) -> None:
    """Events in any order beside the same in theirs: the peer leaves out what it cannot attach."""
    order = {"shape": "out of order", "workers": workers, "block_tokens": 16}
    order |= {"groups": "full", "samples": samples}
    ours, ordered = by_turns([("ours", order), ("ours", order | {"shape": "partly"})])
    if ours["found_blocks"] != ordered["found_blocks"]:
        sys.exit(f"other blocks are found when told out of order: {ours}, {ordered}")
    for what, unit, mine, theirs in (
        ("look-up", "ms CPU", ours["ms"], ordered["ms"]),
        ("memory", "bytes per (worker, block)", held_bytes(ours), held_bytes(ordered)),
        ("events", "M blocks/s of CPU", ours["blocks_per_s"] / 1e6, ordered["blocks_per_s"] / 1e6),
    ):
        is_memory = what == "memory"
        report(
            f"{what}, events out of order, {workers} workers",
            unit,
            mine,
            None,
            in_order=round(theirs, 3),
            target=BYTES_MAX if is_memory else None,
            ok=mine <= BYTES_MAX if is_memory else None,
            note=f"pieces of 64 blocks; median of {samples}",
        )


def without_peer(workers: int, samples: int) -> None:
    """A prompt of which nobody has anything, in layouts without full attention."""
    for groups in ("full", *WITHOUT_FULL):
        order = {"shape": "unknown", "workers": workers, "block_tokens": 16, "samples": samples}
        [ours] = by_turns([("ours", order | {"groups": groups})])
        assert not ours["found_blocks"]
        report(f"look-up, {groups}, unknown, {workers} workers", "ms CPU", ours["ms"], None)


def decisions(*, quick: bool) -> bool:
    """From a request to its submits, with all workers idle."""
    reached = True
    for workers in (100,) if quick else (10, 100, 1000):
        order: Order = {"workers": workers, "block_tokens": 64 if quick else 16}
        for shape in ("nothing", "unknown", *SHAPES):
            for groups in ("full", *(HYBRIDS if shape != "nothing" else ()), *WITHOUT_FULL):
                reached &= decision(shape, order | {"shape": shape, "groups": groups})
        order |= {"shape": "partly"}
        for groups in ("full", *HYBRIDS):
            for held in TIERS:
                reached &= decision(f"tiers: {held}", order | {"groups": groups, "tiers": held})
        for groups in HYBRIDS:
            for lacking in (0.05, 0.2, 1.0):
                irregular = {"groups": groups, "ends": True, "lacking": lacking}
                reached &= decision(f"{lacking:.0%} lack their last block", order | irregular)
        order |= {"policy": "estimated"}
        for groups in ("full", *HYBRIDS):
            for shape in SHAPES:
                measured = {"groups": groups, "shape": shape}
                reached &= decision(f"{shape}, by estimated", order | measured)
    return reached


def decision(name: str, order: Order) -> bool:
    """One case of them."""
    ours = run("decision", order | {"samples": 11})
    return report(
        f"decision, {order['groups']}, {name}, {order['workers']} workers",
        "ms CPU",
        ours["ms"],
        None,
        target=DECISION_MS_MAX,
        ok=ours["ms"] < DECISION_MS_MAX,
        note=f"median of 11; the first one {ours['first_ms']:.3f}",
    )


def main() -> int:
    """Run all cases; 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setup", action="store_true", help="create the peer's environment")
    parser.add_argument("--quick", action="store_true", help="blocks of 64, up to 100 workers")
    parser.add_argument("--decisions", action="store_true", help="the decisions alone")
    chosen = parser.parse_args()
    if chosen.setup:
        set_up()
        return 0
    if chosen.decisions:
        return 0 if decisions(quick=chosen.quick) else 1
    samples, reached = (5 if chosen.quick else 21), True
    for block_tokens in (64,) if chosen.quick else (16, 64):
        for shape in SHAPES:
            for workers in (10, 100) if chosen.quick else (10, 100, 1000):
                name = f"{shape}, blocks of {block_tokens}, {workers} workers"
                order = {
                    "shape": shape,
                    "workers": workers,
                    "block_tokens": block_tokens,
                    "samples": samples,
                    "groups": "full",
                }
                with_hybrids = block_tokens == 16 or chosen.quick
                reached &= beside_the_peer(name, order, HYBRIDS if with_hybrids else ())
    for workers, blocks in ((10, 1000), (100, 200), *(() if chosen.quick else ((1000, 50),))):
        order = {"shape": "single", "workers": workers, "blocks": blocks, "groups": "full"}
        order |= {"block_tokens": 16, "samples": samples}
        reached &= beside_the_peer(f"events of one block, {workers} workers", order)
    for workers, blocks, turns in ((10, 8000, 60), (100, 2000, 30)):
        order = {"shape": "churn", "workers": workers, "blocks": blocks, "turns": turns}
        order |= {"groups": "full", "block_tokens": 16, "samples": samples}
        reached &= beside_the_peer(f"prompts come and go, {workers} workers", order)
    for workers in (10, 100) if chosen.quick else (10, 100, 1000):
        out_of_order(workers, samples)
        without_peer(workers, samples)
    reached &= decisions(quick=chosen.quick)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
