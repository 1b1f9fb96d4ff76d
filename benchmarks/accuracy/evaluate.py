"""lm-eval, unmodified, over local tasks: the program, and what it writes of every item."""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.servers.program import ENVIRONMENT

LIMIT_S = 3_600.0
OFFLINE = {"HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


class EvaluationError(RuntimeError):
    """lm-eval ended with an error, with the end of what it said."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What came of a task.

    Attributes:
        score: the task's metric over all items.
        results: per item, in their order, what the model did: the text, or per choice its
            log-likelihood.
        right: per item whether it counts as right.
    """

    score: float
    results: tuple[Any, ...]
    right: tuple[bool, ...]


def evaluate(
    python: Path,
    folder: Path,
    tasks: Sequence[str],
    model: str,
    model_args: Mapping[str, object],
    *,
    api_key: str = "none",
    limit_s: float = LIMIT_S,
) -> dict[str, Evaluation]:
    """Let lm-eval score a model; returns what came of each task.

    Args:
        python: interpreter of an environment with lm-eval.
        folder: of the tasks' files.
        tasks: their names.
        model: lm-eval's word for the kind of model: ``local-completions``, ``hf``.
        model_args: of that kind.
        api_key: for a server.
        limit_s: after which it is killed.

    Raises:
        EvaluationError: it did not end well; a failed request does that.
    """
    arguments = ",".join(f"{name}={value}" for name, value in model_args.items())
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= ENVIRONMENT | OFFLINE | {"OPENAI_API_KEY": api_key}
    with tempfile.TemporaryDirectory(prefix="disagg-lm-eval-") as out:
        environment["HF_HOME"] = f"{out}/hub"
        command = [str(python), "-m", "lm_eval", "run", "--model", model, "--model_args", arguments]
        command += ["--tasks", ",".join(tasks), "--include_path", str(folder), "--device", "cpu"]
        command += ["--batch_size", "1", "--log_samples", "--output_path", f"{out}/out"]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit_s
        )
        if done.returncode:
            raise EvaluationError(f"lm-eval ended with {done.returncode}:\n{done.stderr[-4000:]}")
        return {task: _read(Path(out) / "out", task) for task in tasks}


def of_server(url: str, model: str, checkpoint: Path, num_concurrent: int) -> dict[str, object]:
    """Arguments of ``local-completions`` for a server without ``/v1`` in its address."""
    return {
        "model": model,
        "base_url": f"{url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": checkpoint,
        "add_bos_token": True,
        "num_concurrent": num_concurrent,
        "max_retries": 1,
    }


def of_one_process(checkpoint: Path) -> dict[str, object]:
    """Arguments of ``hf``: plain transformers inside lm-eval's own process."""
    return {"pretrained": checkpoint, "dtype": "float32", "add_bos_token": True}


def _read(folder: Path, task: str) -> Evaluation:
    (summary,) = folder.rglob("results_*.json")
    (samples,) = folder.rglob(f"samples_{task}_*.jsonl")
    metrics = json.loads(summary.read_text())["results"][task]
    metric = "exact_match" if "exact_match,text" in metrics else "acc"
    (score,) = (value for name, value in metrics.items() if name.split(",")[0] == metric)
    items = [json.loads(line) for line in samples.read_text().splitlines()]
    items.sort(key=lambda item: item["doc_id"])
    return Evaluation(
        score,
        tuple(_result(item["resps"]) for item in items),
        tuple(bool(item[metric]) for item in items),
    )


def _result(responses: list[Any]) -> Any:
    """A text, or per choice its log-likelihood: lm-eval writes both as nested lists."""
    firsts = [one[0] for one in responses]
    if isinstance(firsts[0], str):
        return firsts[0].strip()
    return tuple(float(one[0]) for one in firsts)
