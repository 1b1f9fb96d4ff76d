"""KV transfer between two processes: ``python -m benchmarks.transfer [--quick] [--device cuda]``.

Pulls of 1 MiB to 1 GiB by the production path (offers, READs, commit), beside raw NIXL READs of the
same bytes, memcpy and TCP; what a pull costs the engine's steps; CPU time per pulled block. All
sides in one run, sampled in turn; a JSON line per figure, ratio above 1 is better than the peer.
The exit code is 1 if a target is missed. Nothing is left behind.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.transfer.cost import measure_nodes, measure_tables
from benchmarks.transfer.figures import MS, figure
from benchmarks.transfer.load import measure as measure_load
from benchmarks.transfer.pair import Pair, Pull
from benchmarks.transfer.plan import NodePlan
from benchmarks.transfer.raw import SHAPES, RawOwner, RawReader, SocketOwner, SocketReader
from disagg.kv.kinds.full_attention import FullAttentionSpec

MIB = 1 << 20
LAYERS = (FullAttentionSpec(block_tokens=16, num_kv_heads=4, head_size=256, dtype_bytes=2),) * 4
"""Blocks of 256 KiB: four layers of Gemma 3 4B's heads, bf16."""
BLOCK_BYTES = sum(spec.page_bytes for spec in LAYERS)
SIZES = {1: 15, 4: 15, 16: 15, 64: 15, 256: 9, 1024: 5}
"""MiB pulled, and samples."""
QUICK_SIZES = {1: 3, 16: 5, 64: 3}
TARGET, TARGET_FROM_MIB = 0.9, 16
TRANSPORTS = {
    "cpu": {"shm": "", "tcp": "tcp"},
    "cuda": {"cuda_ipc": "", "tcp by way of the host": "tcp,cuda_copy"},
}
"""By device, what is measured and the value of UCX_TLS for it."""


def say(text: str) -> None:
    """Print progress on standard error."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def peers(pair: Pair, on_gpu: bool) -> Iterator[None]:
    """Connect the raw agents of the two nodes, and a socket where their pools are on the host."""
    info = pair.extra(pair.owner, RawOwner, "info")
    pair.extra(pair.reader, RawReader, "connect", info=info)
    if not on_gpu:
        port = pair.extra(pair.owner, SocketOwner, "port")
        pair.extra(pair.reader, SocketReader, "connect", port=port)
    yield


def measure_pulls(transport: str, tls: str, sizes: dict[int, int], device: str) -> bool:
    """All sizes over one transport; whether the targets were reached."""
    reached, on_gpu = True, device == "cuda"
    blocks = max(sizes) * MIB // BLOCK_BYTES + 64
    plan = NodePlan("", LAYERS, blocks, device=device)
    with Pair(plan, tls) as pair, peers(pair, on_gpu):
        for mib, num_samples in sizes.items():
            say(f"pull {mib} MiB over {transport}")
            pulls: list[Pull] = []
            raw: dict[str, list[float]] = {shape: [] for shape in SHAPES}
            plain: dict[str, list[float]] = {"memcpy": []}
            if not on_gpu:
                plain["TCP socket"] = []
            for number in range(num_samples + 1):
                pull = pair.pull(mib * MIB // BLOCK_BYTES * 16, check=number == 0)
                size = {"num_bytes": mib * MIB}
                reads = {
                    shape: pair.extra(pair.reader, RawReader, "read_s", shape=shape, **size)
                    for shape in SHAPES
                }
                others = {
                    "memcpy": pair.extra(pair.reader, RawReader, "copy_s", **size),
                }
                if not on_gpu:
                    others["TCP socket"] = pair.extra(pair.reader, SocketReader, "read_s", **size)
                if number:  # the first warms up, and its bytes were compared
                    pulls.append(pull)
                    for kept, new in ((raw, reads), (plain, others)):
                        for name, value in new.items():
                            kept[name].append(value)
            reached &= report(transport, mib, pulls, raw, plain)
    return reached


def report(
    transport: str,
    mib: int,
    pulls: list[Pull],
    raw: dict[str, list[float]],
    plain: dict[str, list[float]],
) -> bool:
    """Print the figures of one size; whether its target was reached."""
    best = min(raw, key=lambda shape: statistics.median(raw[shape]))
    ours = [pull.seal_to_commit_s * MS for pull in pulls]
    reads = [pull.reads_s * MS for pull in pulls]
    parts = (
        (
            "until the first READ",
            [p.reads.first["posted"] - p.owner.last["seal sent"] for p in pulls],
        ),
        ("READs", [p.reads_s for p in pulls]),
        ("commit", [p.reader.first["committed"] - p.reads.last["done"] for p in pulls]),
    )
    split = ", ".join(f"{name} {statistics.median(part) * MS:.2f} ms" for name, part in parts)
    name, blocks = f"pull of {mib} MiB, {transport}", f"blocks of {BLOCK_BYTES >> 10} KiB"
    reached = figure(
        name,
        ours,
        [one * MS for one in raw[best]],
        unit="ms",
        target=TARGET if mib >= TARGET_FROM_MIB else None,
        peer_name=f"raw NIXL READ, {best} (the best of {len(raw)} shapes)",
        note=f"from the seal sent to the commit's confirmation, {blocks}: {split}",
    )
    figure(
        f"{name}, its READs alone",
        reads,
        [one * MS for one in raw[best]],
        unit="ms",
        target=None,
        peer_name=f"raw NIXL READ, {best}",
        note="from the first READ asked for to the last one's end",
    )
    for peer, times in plain.items():
        figure(
            f"{name}, beside {peer}",
            ours,
            [one * MS for one in times],
            unit="ms",
            target=None,
            peer_name=peer,
            note="from the seal sent to the commit's confirmation",
        )
    return reached


def main() -> int:
    """Run everything; 1 if a target was missed."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.transfer",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, few samples, < 1 minute")
    parser.add_argument("--device", choices=sorted(TRANSPORTS), default="cpu", help="of the pools")
    given = parser.parse_args()
    quick, device = given.quick, given.device
    reached = True
    for transport, tls in TRANSPORTS[device].items():
        reached &= measure_pulls(transport, tls, QUICK_SIZES if quick else SIZES, device)
    say("engine steps while pulling")
    reached &= measure_load(1 if quick else 9, 1.0 if quick else 2.0, device)
    if device == "cuda":  # bookkeeping does not see where a pool is
        return 0 if reached else 1
    say("control cost per block")
    pool_sizes = [10_000, 100_000] if quick else [10_000, 100_000, 1_000_000]
    reached &= measure_tables(pool_sizes, 5 if quick else 15)
    measure_nodes(pool_sizes[:1] if quick else pool_sizes, 3 if quick else 7)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
