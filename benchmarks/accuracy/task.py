"""A task for lm-eval out of local files: items as JSON lines, and what is done with them."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True, slots=True)
class Item:
    """One question.

    Attributes:
        prompt: without the beginning-of-sequence token, which lm-eval adds.
        answer: the right one, as text; one of ``choices``.
        choices: answers whose likelihoods are compared, as they follow the prompt.
    """

    prompt: str
    answer: str
    choices: tuple[str, ...] = ()


GENERATE, CHOOSE = "disagg_generate", "disagg_choose"
FIRST = {"function": "take_first"}


def write_tasks(folder: Path, items: Sequence[Item], max_tokens: int) -> None:
    """Write two tasks over the same items: `GENERATE` an answer, `CHOOSE` the likeliest one.

    Args:
        folder: for ``--include_path``.
        items: with choices, all of them or none; without, there is no `CHOOSE`.
        max_tokens: of an answer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "items.jsonl"
    data.write_text("".join(json.dumps(asdict(item)) + "\n" for item in items))
    common: dict[str, Any] = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{prompt}}",
        "target_delimiter": " ",
        "metadata": {"version": 1},
    }
    generate = common | {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "do_sample": False, "max_gen_toks": max_tokens},
        "filter_list": [{"name": "text", "filter": [{"function": "remove_whitespace"}, FIRST]}],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    choose = common | {
        "output_type": "multiple_choice",
        "doc_to_target": "{{choices.index(answer)}}",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    tasks: dict[str, dict[str, Any]] = {GENERATE: generate, CHOOSE: choose}
    if not all(item.choices for item in items):
        del tasks[CHOOSE]
    for name, task in tasks.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task | {"task": name}))
