"""Accuracy of the hybrid KV manager: one task, scored by lm-eval, the same in every mode.

lm-eval, unmodified, asks several hundred questions whose answers lie far back in the prompt, and
delayed beyond its question: of plain transformers in its own process, and over HTTP of one worker
of both roles, 1P1D, 1P1D with a prefix cache that has everything (second pass), and 2P2D whose
workers are killed and whose READs fail meanwhile. Every item has to get the same text in all of
them, right or wrong, and in a second task the same likelihoods of four answers. Control: 1P1D whose
window blocks are overwritten after each READ must score less.

    make setup-clients
    python -m benchmarks.accuracy [--quick] [--num N]

A JSON line per mode on standard output, then the table of docs/accuracy.md on standard error; exit
code 1 if any item differs, or the control does not. Counts only, nothing is timed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.accuracy.clusters import CONTROL, MODES, Mode, counted, serving, url_of
from benchmarks.accuracy.evaluate import Evaluation, evaluate, of_one_process, of_server
from benchmarks.accuracy.questions import MAX_TOKENS, draw_items
from benchmarks.accuracy.task import CHOOSE, GENERATE, write_tasks

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-clients-lm_eval" / "bin" / "python"
CHECKPOINT = ROOT / ".cache" / "demo-checkpoint"
NUM_CONCURRENT = 4
ONE_PROCESS = "one process: plain transformers inside lm-eval"
TOLERANCE = 1e-3
"""Of log-likelihoods: sums of up to eight, each equal to 1e-4."""
TASKS = (GENERATE, CHOOSE)
COUNTS = ("requests", "pulled_bytes", "prefill_tokens:hit", "replans", "workers_lost")
COLUMNS = (
    "mode",
    "exact match",
    "same text as one process",
    "likeliest of four right",
    "same likelihoods",
    "requests",
    "KV pulled, KiB",
    "prompt tokens from the cache",
    "planned anew",
    "workers lost",
)


@dataclass(frozen=True, slots=True)
class Row:
    """What came of a mode, beside the one process."""

    name: str
    generated: Evaluation
    chosen: Evaluation
    num_same_texts: int
    num_same_likelihoods: int
    counts: dict[str, int]
    other_texts: list[tuple[int, str, str]]
    """Number of an item, the one process's text, the mode's."""

    @property
    def is_same(self) -> bool:
        """Whether every item had the same text and likelihoods."""
        num = len(self.generated.results)
        return self.num_same_texts == self.num_same_likelihoods == num


def main() -> None:
    """Run all modes; exit code 1 if one differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="40 items")
    parser.add_argument("--num", type=int, default=320, help="items (default 320)")
    parser.add_argument("--python", type=Path, default=PYTHON, help="interpreter with lm-eval")
    given = parser.parse_args()
    if not given.python.exists():
        sys.exit(f"{given.python} is missing: make setup-clients")
    train = [sys.executable, "-m", "demo.train", "--out", str(CHECKPOINT)]
    if subprocess.run(train, cwd=ROOT, stdout=sys.stderr).returncode:
        sys.exit("the checkpoint could not be made; the reason is above")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="disagg-accuracy-") as folder:
        tasks = Path(folder) / "tasks"
        write_tasks(tasks, draw_items(40 if given.quick else given.num), MAX_TOKENS)
        model_args = of_one_process(CHECKPOINT)
        found = evaluate(given.python, tasks, TASKS, "hf", model_args)
        rows.append(compare(ONE_PROCESS, found, None, {}))
        show(rows[0])
        for number, mode in enumerate((*MODES, CONTROL)):
            rows.append(run(mode, given.python, tasks, Path(folder) / str(number), rows[0]))
            show(rows[-1])
    print(table(rows), file=sys.stderr)
    *same, control = rows
    raise SystemExit(not all(row.is_same for row in same) or not is_worse(control, rows[0]))


def run(mode: Mode, python: Path, tasks: Path, logs: Path, reference: Row) -> Row:
    """Let lm-eval score a mode."""
    with serving(mode, CHECKPOINT, logs) as cluster:
        model_args = of_server(*url_of(cluster), CHECKPOINT, NUM_CONCURRENT)
        for _ in range(mode.passes):
            before = counted(cluster)
            found = evaluate(python, tasks, TASKS, "local-completions", model_args)
        after = counted(cluster)
    counts = {name: number - before.get(name, 0) for name, number in after.items()}
    return compare(mode.name, found, reference, counts)


def compare(
    name: str, found: dict[str, Evaluation], reference: Row | None, counts: dict[str, int]
) -> Row:
    """Count the items that came out as in the reference; without one, with themselves."""
    generated, chosen = (found[task] for task in TASKS)
    texts = reference.generated.results if reference else generated.results
    likelihoods = reference.chosen.results if reference else chosen.results
    pairs = zip(texts, generated.results, strict=True)
    others = [(at, a, b) for at, (a, b) in enumerate(pairs) if a != b]
    same_likelihoods = sum(
        all(abs(x - y) <= TOLERANCE for x, y in zip(a, b, strict=True))
        for a, b in zip(likelihoods, chosen.results, strict=True)
    )
    same_texts = len(texts) - len(others)
    return Row(name, generated, chosen, same_texts, same_likelihoods, counts, others)


def is_worse(control: Row, reference: Row) -> bool:
    """Whether the task sees KV that is wrong."""
    return control.generated.score < reference.generated.score - 0.1


def show(row: Row) -> None:
    """Print a row's JSON line."""
    line = {
        "name": f"accuracy: {row.name}",
        "items": len(row.generated.results),
        "exact_match": row.generated.score,
        "same_text": row.num_same_texts,
        "choice_accuracy": row.chosen.score,
        "same_likelihoods": row.num_same_likelihoods,
        "counts": row.counts,
        "other_texts": row.other_texts[:5],
    }
    print(json.dumps(line), flush=True)


def table(rows: list[Row]) -> str:
    """The table of docs/accuracy.md."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|" + "---|" * (len(COLUMNS) - 1)]
    for row in rows:
        num, counts = len(row.generated.results), row.counts
        numbers = [counts.get(name, 0) for name in COUNTS]
        numbers[1] //= 1024
        cells = [
            row.name,
            f"{row.generated.score:.3f}",
            f"{row.num_same_texts} of {num}",
            f"{row.chosen.score:.3f}",
            f"{row.num_same_likelihoods} of {num}",
            *(str(number) if counts else "-" for number in numbers),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
