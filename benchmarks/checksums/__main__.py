"""What checksums cost a hand-over: ``python -m benchmarks.checksums [--quick]``.

The same hand-overs between two processes with ``transfer.checksums`` on and, in turn with them,
off: production objects, real NIXL, a stand-in for the engine. First the time between prefill and
decode that a hand-over leaves exposed, for prompts of 1k to 64k tokens, pulled after every chunk;
then GB/s of pulls whose blocks are offered all at once, from the end of the prefill to the commit,
and the CPU time of the threads that compute them. What was pulled is compared with what was
written. A JSON line per figure, a ratio above 1 beats the hand-over without; exit code 1 if a
target is missed.
"""

import argparse
import statistics
import sys
from dataclasses import replace

from benchmarks.exposed_time.__main__ import CHUNK_TOKENS, SHAPE, TOKENS_PER_S
from benchmarks.transfer.__main__ import BLOCK_BYTES, LAYERS, MIB
from benchmarks.transfer.figures import MS, figure
from benchmarks.transfer.pair import Pair, Pull
from benchmarks.transfer.plan import NodePlan

LENGTHS = (1_024, 4_096, 16_384, 65_536)
QUICK_LENGTHS = (1_024, 8_192)
SIZES = (1, 16, 64, 256)
QUICK_SIZES = (1, 16, 64)
"""MiB of a pull."""
EXPOSED_TARGET = 0.8
"""Of the exposed time without checksums through that with them, at the longest prompt."""
TRANSPORTS = {"shm": "", "tcp": "tcp"}
PEER = "the same without checksums"


class Both:
    """A pair of nodes with checksums and one without, which pull in turn."""

    def __init__(self, plan: NodePlan, transport: str) -> None:
        self._plan, self._tls = plan, TRANSPORTS[transport]

    def __enter__(self) -> tuple[Pair, Pair]:
        self._pairs: list[Pair] = []
        try:
            for checksums in (True, False):
                self._pairs.append(Pair(replace(self._plan, checksums=checksums), self._tls))
        except BaseException:
            self.__exit__()
            raise
        with_them, without = self._pairs
        return with_them, without

    def __exit__(self, *_: object) -> None:
        for pair in self._pairs:
            pair.end()


def in_turn(
    pairs: tuple[Pair, Pair], num_tokens: int, num_samples: int, *, decode: bool
) -> tuple[list[Pull], list[Pull]]:
    """Hand-overs with checksums and without, the first ones left out."""
    pulls: tuple[list[Pull], list[Pull]] = [], []
    for number in range(num_samples + 1):
        for pair, kept in zip(pairs, pulls, strict=True):
            pull = pair.pull(num_tokens, decode=decode)
            if number:
                kept.append(pull)
    return pulls


def measure_exposed(transport: str, lengths: tuple[int, ...], num_samples: int) -> bool:
    """All lengths over one transport; whether the target was reached."""
    layout, reached = SHAPE.layout(), True
    layers = tuple(SHAPE.spec(layer) for layer in range(SHAPE.num_layers))
    blocks = max(lengths) // 16 + len(layout.groups) * (1_024 + 2 * CHUNK_TOKENS) // 16 + 64
    plan = NodePlan(
        "", layers, blocks, max_step_tokens=CHUNK_TOKENS, tokens_per_s=float(TOKENS_PER_S)
    )
    note = (
        f"{SHAPE.name}'s {SHAPE.num_layers} layers, blocks of {layout.block_bytes >> 10} KiB, "
        f"prefill of {TOKENS_PER_S} tokens/s (paced stand-in) in chunks of {CHUNK_TOKENS}"
    )
    with Both(plan, transport) as pairs:
        for length in lengths:
            print(f"{length} tokens over {transport}", file=sys.stderr, flush=True)
            ours, peer = in_turn(pairs, length, num_samples, decode=True)
            reached &= figure(
                f"exposed time with checksums, {length} tokens, {transport}",
                [pull.exposed_s * MS for pull in ours],
                [pull.exposed_s * MS for pull in peer],
                unit="ms",
                target=EXPOSED_TARGET if length == max(lengths) else None,
                peer_name=PEER,
                note=f"{note}; {ours[0].num_blocks} blocks pulled, all compared",
            )
    return reached


def rate_of(pull: Pull, mib: int) -> float:
    """GB/s from the end of the prefill to the commit."""
    return mib * MIB / (pull.reader.first["committed"] - pull.owner.last["step ended"]) / 1e9


def measure_rates(transport: str, sizes: tuple[int, ...], num_samples: int) -> None:
    """Pulls of all sizes over one transport."""
    plan = NodePlan("", LAYERS, max(sizes) * MIB // BLOCK_BYTES + 64)
    with Both(plan, transport) as pairs:
        for mib in sizes:
            print(f"pull of {mib} MiB over {transport}", file=sys.stderr, flush=True)
            before = cpu_s(pairs[0])
            ours, peer = in_turn(pairs, mib * MIB // BLOCK_BYTES * 16, num_samples, decode=False)
            spent_s = (cpu_s(pairs[0]) - before) / (num_samples + 1)
            figure(
                f"pull of {mib} MiB with checksums, {transport}",
                [rate_of(pull, mib) for pull in ours],
                [rate_of(pull, mib) for pull in peer],
                unit="GB/s",
                target=None,
                peer_name=PEER,
                higher_is_better=True,
                note=(
                    f"blocks of {BLOCK_BYTES >> 10} KiB, offered at once, from the end of the "
                    f"prefill to the commit ({median_ms(ours):.2f} ms, without "
                    f"{median_ms(peer):.2f} ms); {spent_s * MS:.2f} ms of CPU for checksums, of "
                    "both workers"
                ),
            )


def median_ms(pulls: list[Pull]) -> float:
    """From the end of the prefill to the commit."""
    return MS * statistics.median(
        pull.reader.first["committed"] - pull.owner.last["step ended"] for pull in pulls
    )


def cpu_s(pair: Pair) -> float:
    """CPU time that the threads for checksums have used, of owner and reader."""
    used = (remote.call("cpu_s").get("checksums", 0.0) for remote in pair.remotes)
    return float(sum(used))


def main() -> int:
    """Run both transports; 1 if a target was missed."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.checksums",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="up to 8k tokens, < 1 minute")
    quick = parser.parse_args().quick
    reached = True
    for transport in TRANSPORTS:
        lengths, samples = (QUICK_LENGTHS, 3) if quick else (LENGTHS, 7)
        reached &= measure_exposed(transport, lengths, samples)
        measure_rates(transport, QUICK_SIZES if quick else SIZES, 5 if quick else 15)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
