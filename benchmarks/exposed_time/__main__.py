"""Exposed transfer time: ``python -m benchmarks.exposed_time [--quick] [--device cuda]``.

From the end of the prefill's last step to the begin of the first decode step at the other worker,
for prompts of 1k to 64k tokens, with the production objects and real NIXL between two processes.
Blocks are offered and pulled after every chunk; the peer, in the same run and in turn with it,
offers everything at the seal (pull-at-the-end). The engine is a stand-in that writes a chunk's
blocks and uses up the time a given speed takes: the transfer is measured, not a model. What was
pulled is compared with what was written. A JSON line per length, a ratio above 1 beats the peer;
the last lines have the time at the shortest prompt through that at the longest, 1 being flat. The
exit code is 1 if a target is missed.
"""

import argparse
import sys

from benchmarks.transfer.__main__ import TRANSPORTS
from benchmarks.transfer.figures import MS, figure
from benchmarks.transfer.pair import Pair, Pull
from benchmarks.transfer.plan import NodePlan
from benchmarks.transfer_bytes.shapes import SHAPES

SHAPE = next(shape for shape in SHAPES if shape.name == "gemma-3-4b")
LENGTHS = (1_024, 4_096, 16_384, 65_536)
QUICK_LENGTHS = (1_024, 8_192)
CHUNK_TOKENS = 512
TOKENS_PER_S = 16_000
"""Of the prefill: a chunk takes 32 ms."""
FLAT_TARGET = 0.5
"""Exposed time of the shortest prompt through that of the longest."""


def measure(
    transport: str, tls: str, lengths: tuple[int, ...], num_samples: int, device: str
) -> bool:
    """All lengths over one transport; whether the target was reached."""
    layout = SHAPE.layout()
    layers = tuple(SHAPE.spec(layer) for layer in range(SHAPE.num_layers))
    # A prompt in every group, as the owner keeps what left a window until it is evicted.
    blocks = max(lengths) // 16 + len(layout.groups) * (1_024 + 2 * CHUNK_TOKENS) // 16 + 64
    plan = NodePlan(
        "",
        layers,
        blocks,
        max_step_tokens=CHUNK_TOKENS,
        tokens_per_s=float(TOKENS_PER_S),
        device=device,
    )
    ours: dict[int, list[Pull]] = {length: [] for length in lengths}
    peer: dict[int, list[Pull]] = {length: [] for length in lengths}
    with Pair(plan, tls) as pair:
        for number in range(num_samples + 1):
            for length in lengths if number else lengths[:1]:
                print(f"{length} tokens over {transport}", file=sys.stderr, flush=True)
                for pulls, pipelined in ((ours, True), (peer, False)):
                    pair.owner.call("set_pipelined", pipelined=pipelined)
                    pull = pair.pull(length, decode=True)
                    if number:  # the first round warms up
                        pulls[length].append(pull)
    note = (
        f"{SHAPE.name}'s {SHAPE.num_layers} layers in {len(layout.groups)} groups, blocks of "
        f"{layout.block_bytes >> 10} KiB, prefill of {TOKENS_PER_S} tokens/s (paced stand-in) in "
        f"chunks of {CHUNK_TOKENS}"
    )
    exposed = {n: [pull.exposed_s * MS for pull in pulls] for n, pulls in ours.items()}
    at_end = {n: [pull.exposed_s * MS for pull in pulls] for n, pulls in peer.items()}
    for length in lengths:
        figure(
            f"exposed time, {length} tokens, {transport}",
            exposed[length],
            at_end[length],
            unit="ms",
            target=None,
            peer_name="offers at the seal only",
            note=f"{note}; {ours[length][0].num_blocks} blocks pulled, all compared",
        )
    first, last = lengths[0], lengths[-1]
    name = f"exposed time grows little from {first} to {last} tokens, {transport}"
    reached = True
    for case, found, target in (
        ("", exposed, FLAT_TARGET),
        (", offers at the seal only", at_end, None),
    ):
        reached &= figure(
            name + case,
            found[last],
            found[first],
            unit="ms",
            target=target,
            peer_name=f"{first} tokens",
            note=note,
        )
    return reached


def main() -> int:
    """Run both transports; 1 if a target was missed."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.exposed_time",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="up to 8k tokens, < 1 minute")
    parser.add_argument("--device", choices=sorted(TRANSPORTS), default="cpu", help="of the pools")
    given = parser.parse_args()
    lengths, num_samples = (QUICK_LENGTHS, 3) if given.quick else (LENGTHS, 5)
    reached = True
    for transport, tls in TRANSPORTS[given.device].items():
        reached &= measure(transport, tls, lengths, num_samples, given.device)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
