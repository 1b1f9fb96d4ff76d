"""Makes the demo's checkpoint: ``python -m demo.train --out DIR [--seed N]``.

Exit status: 0 the checkpoint is there (made now, or found complete); 1 no seed reached the target
and no model was written; 2 the arguments or the directory cannot be used.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar
from rich.text import Text
from transformers import Gemma3ForCausalLM
from transformers.utils import logging as transformers_logging

from demo.checkpoint import Marker, prepare_directory, read_marker, recipe_digest, write_checkpoint
from demo.model import CONTEXT_TOKENS
from demo.tokenizer import build_tokenizer
from demo.training import RECIPE, Progress, Recipe, answer_accuracy, attempt, held_out_prompts
from disagg.errors import ConfigError

ACCURACY_TARGET = 0.95
NUM_ATTEMPTS = 2
NUM_HELD_OUT_LISTS = 20


def make_checkpoint(directory: Path, seed: int, recipe: Recipe, console: Console) -> Marker | None:
    """Train and write the checkpoint, unless the directory already holds this one.

    Args:
        directory: created if need be.
        seed: the first to try; the next one is tried if it misses the target.
        recipe: what to train.
        console: where progress is shown.

    Returns:
        The marker of the complete checkpoint; None if no attempt reached ``ACCURACY_TARGET``, and
        then no model has been written.

    Raises:
        ConfigError: the directory cannot be used.
    """
    digest = recipe_digest(recipe)
    found = read_marker(directory)
    if found is not None and (found.recipe, found.seed) == (digest, seed):
        console.print(f"{directory} is complete (accuracy {found.accuracy:.3f}): nothing to do")
        return found
    prepare_directory(directory)
    tokenizer = build_tokenizer(CONTEXT_TOKENS)
    prompts = held_out_prompts(NUM_HELD_OUT_LISTS)
    for trained_seed in range(seed, seed + NUM_ATTEMPTS):
        model, finished = _attempt_visibly(recipe, trained_seed, console)
        accuracy = answer_accuracy(model, tokenizer, prompts)
        verdict = f"{accuracy:.3f} of {len(prompts)} whole answers right (target {ACCURACY_TARGET})"
        if finished and accuracy >= ACCURACY_TARGET:
            console.print(f"seed {trained_seed}: {verdict}")
            marker = Marker(digest, seed, trained_seed, accuracy)
            write_checkpoint(directory, model, tokenizer, marker)
            console.print(f"wrote {directory}")
            return marker
        console.print(f"[red]seed {trained_seed} missed the target:[/red] {verdict}")
    return None


def main(arguments: Sequence[str] | None = None, recipe: Recipe = RECIPE) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m demo.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--seed", type=int, default=0, help="first seed to try (default 0)")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, soft_wrap=True)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        marker = make_checkpoint(options.out, options.seed, recipe, console)
    except ConfigError as error:
        console.print(Text.assemble(("error:", "red"), f" {error.message}"))
        return 2
    if marker is None:
        console.print("[red]error:[/red] no checkpoint was written; try another --seed")
        return 1
    return 0


def _attempt_visibly(recipe: Recipe, seed: int, console: Console) -> tuple[Gemma3ForCausalLM, bool]:
    """One attempt with a progress bar per stage, and a line when it ends."""
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    bars = ProgressBar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps, accuracy {task.fields[accuracy]:.3f}"),
        TimeElapsedColumn(),
        console=console,
    )
    rows = {
        stage.name: bars.add_task(
            f"seed {seed} stage {number}/{len(recipe.stages)} {stage.name}",
            total=stage.steps_max,
            accuracy=0.0,
            start=False,
        )
        for number, stage in enumerate(recipe.stages, start=1)
    }

    def show(progress: Progress) -> None:
        row = rows[progress.stage.name]
        if progress.steps == 1:
            bars.start_task(row)
        bars.update(row, completed=progress.steps, accuracy=progress.accuracy)
        if progress.is_mastered:
            bars.update(row, total=progress.steps)

    with bars:
        model, finished = attempt(recipe, seed, show)
    console.print(
        f"seed {seed}: trained in {time.monotonic() - start_s:.0f} s "
        f"({time.process_time() - start_cpu_s:.0f} s of CPU)"
    )
    return model, finished


if __name__ == "__main__":
    sys.exit(main())
