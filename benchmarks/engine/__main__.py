"""Engines beside each other, without servers: ``python -m benchmarks.engine [--quick]``.

Prefill of 2k tokens and decode at several batch sizes, 1k tokens of context each: our native
engine, vLLM's model runner under our scheduler, vLLM alone (its offline engine) and transformers'
``generate``; same checkpoint (63 M parameters, Gemma 3, float32), same threads, a process each,
sampled in turn after their tokens were compared. Then what is ours of a step around vLLM's runner
(scheduling, tables, sampling), by context, beside what is vLLM's own around it. A JSON line per
figure, ratio above 1 is better than the peer; the exit code is 1 if a target is missed.
``--setup`` first installs vLLM (``make install-vllm``).
"""

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.engine.checkpoint import VOCAB_SIZE, make_checkpoint
from benchmarks.engine.process import Process
from benchmarks.servers.environment import PYTHON, set_up
from benchmarks.transfer.figures import MS, figure, spread_of

NATIVE, VLLM, ALONE, GENERATE = "native", "vllm", "vllm_alone", "transformers"
NAMES = {
    NATIVE: "the native engine",
    VLLM: "vLLM's runner under disagg",
    ALONE: "vLLM alone",
    GENERATE: "transformers generate",
}
PAIRS = ((VLLM, ALONE), (NATIVE, VLLM), (NATIVE, ALONE), (NATIVE, GENERATE))
BATCHES = (1, 8, 16, 32, 64)
CONTEXT = 1_024
NUM_STEPS = 8
"""Decode steps in a sample."""
PREFILL = 2_048
SHARE_BATCH, SHARE_CONTEXTS = 32, (256, 1_024, 4_096)
SHARE_MAX = 5.0
"""Percent of a step's CPU time that may be ours."""
NATIVE_MIN, NATIVE_BATCH_MAX = 0.9, 16
"""The native engine's aim beside vLLM's runner, up to this batch."""

Samples = dict[str, list[dict[str, float]]]


def say(text: str) -> None:
    """Print progress on standard error."""
    print(text, file=sys.stderr, flush=True)


def prompts(
    num: int, length: int, seed: int, *, shared: int = 0, vocab_size: int = VOCAB_SIZE
) -> list[list[int]]:
    """Random prompts whose first ``shared`` tokens are the same."""
    rng = random.Random(seed)

    def some(count: int) -> list[int]:
        return [rng.randrange(4, vocab_size) for _ in range(count)]

    start = some(shared)
    return [start + some(length - shared) for _ in range(num)]


def check(processes: dict[str, Process], num_tokens: int = 16) -> None:
    """Compare greedy tokens; nothing is measured where they differ."""
    for length in (40, 700):
        found = {}
        for name, process in processes.items():
            process.fill(prompts(1, length, seed=length))
            process.decode(num_tokens - 1)
            found[name] = process.clear()[0][:num_tokens]
        if len({tuple(tokens) for tokens in found.values()}) > 1:
            sys.exit(f"tokens differ after {length}: {found}")


def in_turn(
    processes: dict[str, Process],
    num_samples: int,
    sample: Callable[[Process, int], dict[str, float]],
) -> Samples:
    """Samples of every process, each round in another order; a first one is not kept."""
    samples: Samples = {name: [] for name in processes}
    order = list(processes)
    for number in range(num_samples + 1):
        order = order[1:] + order[:1]
        for name in order:
            spent = sample(processes[name], number)
            if number:
                samples[name].append(spent)
    return samples


def report(case: str, samples: Samples, *, native_target: float | None) -> bool:
    """Print a case's pairs; returns whether the targets were reached."""
    reached = True
    for ours, peer in PAIRS:
        if not {ours, peer} <= samples.keys():
            continue
        cpu = {
            name: MS * statistics.median(one["cpu"] for one in samples[name])
            for name in (ours, peer)
        }
        reached &= figure(
            f"{case}: {NAMES[ours]}",
            [MS * one["wall"] for one in samples[ours]],
            [MS * one["wall"] for one in samples[peer]],
            unit="ms",
            target=native_target if (ours, peer) == (NATIVE, VLLM) else None,
            peer_name=NAMES[peer],
            note=f"CPU {cpu[ours]:.4g} and {cpu[peer]:.4g} ms",
        )
    return reached


def measure_speed(processes: dict[str, Process], batches: Sequence[int], num_samples: int) -> bool:
    """Prefill, then decode with batches that grow."""
    say(f"prefill of {PREFILL}")
    rounds = prompts(num_samples + 1, PREFILL, seed=2)
    samples = in_turn(processes, num_samples, lambda one, number: one.prefill(rounds[number]))
    reached = report(f"prefill of {PREFILL:,} tokens", samples, native_target=None)
    everyone = prompts(max(batches), CONTEXT, seed=3)
    for batch in batches:
        for name, process in processes.items():
            say(f"{batch} sequences of {CONTEXT} tokens: {name}")
            process.fill(everyone[:batch])
        samples = in_turn(processes, num_samples, lambda one, _: one.decode(NUM_STEPS))
        reached &= report(
            f"decode step of {batch} at {CONTEXT:,} tokens",
            samples,
            native_target=NATIVE_MIN if batch <= NATIVE_BATCH_MAX else None,
        )
    for process in processes.values():
        process.clear()
    return reached


def measure_share(processes: dict[str, Process], contexts: Sequence[int], num_samples: int) -> bool:
    """What is around vLLM's runner in a decode step, ours and vLLM's own."""
    reached = True
    for kind, temperature in (("greedy", 0.0), ("temperature 1, top_p 0.95", 1.0)):
        around: dict[int, float] = {}
        for context in contexts:
            say(f"share of {kind} steps at {context} tokens")
            # A common prefix is computed once; attention finds it in caches, which makes the
            # runner's part, and so what ours is compared with, smaller.
            batch = prompts(SHARE_BATCH, context, seed=context, shared=context - 64)
            for process in processes.values():
                process.fill(batch[:1], temperature)
                process.fill(batch, temperature)
            samples = in_turn(processes, num_samples, lambda one, _: one.share(NUM_STEPS))
            for process in processes.values():
                process.clear()
            shares = {
                name: [100 * (one["cpu"] - one["runner"]) / one["cpu"] for one in many]
                for name, many in samples.items()
            }
            ours = [MS * (one["cpu"] - one["runner"]) for one in samples[VLLM]]
            around[context] = statistics.median(ours)
            step = MS * statistics.median(one["cpu"] for one in samples[VLLM])
            share = statistics.median(shares[VLLM])
            reached &= figure(
                f"around vLLM's runner, {SHARE_BATCH} sequences of {context:,} tokens, {kind}",
                shares[VLLM],
                shares[ALONE],
                unit="% of the step's CPU",
                target=None,
                peer_name=NAMES[ALONE],
                note=f"{around[context]:.3g} of {step:.4g} ms, {spread_of(ours)}; at most"
                f" {SHARE_MAX} % {'reached' if share <= SHARE_MAX else 'MISSED'}",
            )
            reached &= share <= SHARE_MAX
        least, most = min(contexts), max(contexts)
        reached &= figure(
            f"around vLLM's runner, from {least:,} to {most:,} tokens, {kind}",
            [around[most]],
            [around[least]],
            unit="ms CPU",
            target=0.8,
            peer_name=f"the same at {least:,} tokens",
            note="does not grow with the context",
        )
    return reached


def main() -> int:
    """Run all cases; 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setup", action="store_true", help="install vLLM first")
    parser.add_argument("--quick", action="store_true", help="fewer samples, small batches only")
    parser.add_argument("--python", type=Path, default=PYTHON, help="of an environment with vLLM")
    parser.add_argument("--threads", type=int, default=1, help="of each engine (default 1)")
    parser.add_argument("--only", choices=("speed", "share"), help="one part of the figures")
    chosen = parser.parse_args()
    if chosen.setup:
        set_up()
    checkpoint = make_checkpoint()
    num_samples = 3 if chosen.quick else 7
    reached = True
    with ExitStack() as stack:
        started = [
            Process(chosen.python, name, checkpoint, chosen.threads)
            for name in NAMES
            if chosen.only != "share" or name in (VLLM, ALONE)
        ]
        processes = {one.name: stack.enter_context(one) for one in started}
        check(processes)
        if chosen.only != "share":
            batches = BATCHES[:2] if chosen.quick else BATCHES
            reached &= measure_speed(processes, batches, num_samples)
        if chosen.only != "speed":
            contexts = SHARE_CONTEXTS[:2] if chosen.quick else SHARE_CONTEXTS
            both = {name: processes[name] for name in (VLLM, ALONE)}
            reached &= measure_share(both, contexts, num_samples)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
