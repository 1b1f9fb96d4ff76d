"""The accuracy benchmark's task, what it reads of lm-eval's files, and what it calls the same."""

import json
from dataclasses import replace
from pathlib import Path

import yaml

from benchmarks.accuracy.__main__ import compare, is_worse, table
from benchmarks.accuracy.clusters import counted_on
from benchmarks.accuracy.evaluate import Evaluation, _read
from benchmarks.accuracy.questions import NUM_QUESTIONS, draw_items
from benchmarks.accuracy.task import CHOOSE, GENERATE, Item, write_tasks

TEXTS = Evaluation(1.0, ("7 plus 41", "9"), (True, True))
LIKELIHOODS = Evaluation(0.5, ((-1.0, -2.0), (-3.0, -1.0)), (True, False))
FOUND = {GENERATE: TEXTS, CHOOSE: LIKELIHOODS}


def test_items_are_the_same_for_a_seed_and_have_one_right_choice() -> None:
    items = draw_items(40)
    assert items == draw_items(40) != draw_items(40, seed=1)
    assert all(item.choices.count(item.answer) == 1 for item in items)
    assert len({item.prompt for item in items}) == 40
    # About one document there are several questions: what a prefix cache is for.
    beginnings = {item.prompt.split("?")[0] for item in items}
    assert len(beginnings) == 40 / NUM_QUESTIONS
    lengths = [len(one.split()) for one in beginnings]
    assert max(lengths) > 3 * min(lengths)


def test_the_answer_stands_far_from_the_question() -> None:
    for item in draw_items(40):
        before, question = item.prompt.rsplit("?", 1)
        key = question.split()[1]
        first = item.answer.split()[0]
        at = before.rindex(f"{key}{first} ")
        assert len(before[at:].split()) > 16, "inside the window"


def test_tasks_are_local_files(tmp_path: Path) -> None:
    items = [Item("a", "b", ("c", "b")), Item("d", "e", ("e", "f"))]
    write_tasks(tmp_path, items, max_tokens=4)
    tasks = {path.stem: yaml.safe_load(path.read_text()) for path in tmp_path.glob("*.yaml")}
    assert tasks.keys() == {GENERATE, CHOOSE}
    for task in tasks.values():
        data = Path(task["dataset_kwargs"]["data_files"]["test"])
        assert [json.loads(line)["prompt"] for line in data.read_text().splitlines()] == ["a", "d"]
    write_tasks(tmp_path / "plain", [Item("a", "b")], max_tokens=4)
    assert [path.stem for path in (tmp_path / "plain").glob("*.yaml")] == [GENERATE]


def test_what_lm_eval_writes_is_read_in_the_items_order(tmp_path: Path) -> None:
    results = {GENERATE: {"exact_match,text": 0.5, "exact_match_stderr,text": 0.1}}
    (tmp_path / "results_x.json").write_text(json.dumps({"results": results}))
    samples = [
        {"doc_id": 1, "resps": [[" 9"]], "exact_match": 0.0},
        {"doc_id": 0, "resps": [[" 7 plus 41"]], "exact_match": 1.0},
    ]
    lines = "\n".join(map(json.dumps, samples))
    (tmp_path / f"samples_{GENERATE}_x.jsonl").write_text(lines)
    assert _read(tmp_path, GENERATE) == Evaluation(0.5, ("7 plus 41", "9"), (True, False))
    results = {CHOOSE: {"acc,none": 1.0, "acc_stderr,none": 0.0}}
    (tmp_path / "results_x.json").write_text(json.dumps({"results": results}))
    sample = {"doc_id": 0, "resps": [[["-1.5", "False"]], [["-0.5", "True"]]], "acc": 1.0}
    (tmp_path / f"samples_{CHOOSE}_x.jsonl").write_text(json.dumps(sample))
    assert _read(tmp_path, CHOOSE) == Evaluation(1.0, ((-1.5, -0.5),), (True,))


def test_a_mode_is_the_same_item_by_item() -> None:
    reference = compare("one process", FOUND, None, {})
    assert reference.is_same
    assert compare("equal", FOUND, reference, {}).is_same
    other_text = FOUND | {GENERATE: replace(TEXTS, results=("7 plus 41", "8"))}
    assert not compare("other text", other_text, reference, {}).is_same
    likelihoods = ((-1.0, -2.0), (-3.0, -1.1))
    other = FOUND | {CHOOSE: replace(LIKELIHOODS, results=likelihoods)}
    row = compare("other likelihood", other, reference, {"requests": 4, "pulled_bytes": 2048})
    assert (row.num_same_texts, row.num_same_likelihoods, row.is_same) == (2, 1, False)
    assert "| 2 of 2 | 0.500 | 1 of 2 | 4 | 2 |" in table([row])
    assert not is_worse(row, reference)
    low = compare("low", FOUND | {GENERATE: replace(TEXTS, score=0.4)}, reference, {})
    assert is_worse(low, reference)


def test_the_routers_counters_are_found() -> None:
    page = (
        'disagg_routing_plans_total{kind="handover",model_name="m"} 12.0\n'
        'disagg_routing_pulled_bytes_total{kind="full",model_name="m"} 1.5e+03\n'
        'disagg_routing_pulled_bytes_total{kind="window",model_name="m"} 500.0\n'
        "disagg_routing_requests_total 3.0\n"
    )
    assert counted_on(page) == {
        "plans": 12,
        "plans:handover": 12,
        "pulled_bytes": 2000,
        "pulled_bytes:full": 1500,
        "pulled_bytes:window": 500,
        "requests": 3,
    }
