"""The engines that the engine benchmark compares do the same work."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.engine.__main__ import in_turn, prompts
from benchmarks.engine.checkpoint import make_checkpoint
from benchmarks.engine.process import Process
from benchmarks.engine.subject import Bounds, Subject, make_subject, obey

LENGTH, NUM_TOKENS = 300, 6  # longer than the window


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("model"), num_layers=6, hidden_size=64, vocab_size=500
    )


@pytest.fixture(scope="module")
def subjects(checkpoint: Path) -> dict[str, Subject]:
    bounds = Bounds(checkpoint, num_blocks=600, max_model_tokens=512)
    return {name: make_subject(name, bounds) for name in ("native", "transformers")}


def test_native_and_transformers_give_the_same_tokens(subjects: dict[str, Subject]) -> None:
    asked = prompts(3, LENGTH, seed=1, vocab_size=500)
    first = {name: one.prefill(asked[0]) for name, one in subjects.items()}
    found = {}
    for name, subject in subjects.items():
        subject.fill(asked[:1], 0.0)
        subject.fill(asked, 0.0)  # for one of them the first is there already
        subject.decode(NUM_TOKENS)
        found[name] = [tokens[:NUM_TOKENS] for tokens in subject.clear()]
    assert found["native"] == found["transformers"]
    assert len({tuple(tokens) for tokens in found["native"]}) == 3  # control
    assert set(first.values()) == {found["native"][0][0]}


def test_an_order_is_timed(subjects: dict[str, Subject]) -> None:
    for subject in subjects.values():
        spent = obey(subject, {"prefill": prompts(1, 40, seed=2, vocab_size=500)[0]})
        assert spent["wall"] > 0
        assert spent["cpu"] > 0
        with pytest.raises(ValueError, match="unknown order"):
            obey(subject, {"sleep": 1})


def test_prompts_share_what_is_asked_for() -> None:
    one, other = prompts(2, 50, seed=1, shared=30)
    assert one[:30] == other[:30]
    assert one[30:] != other[30:]
    assert len(one) == len(other) == 50


@pytest.fixture(scope="module")
def processes(checkpoint: Path) -> Iterator[dict[str, Process]]:
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(Process(Path(sys.executable), name, checkpoint, 1))
            for name in ("vllm", "vllm_alone")
        }


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_both_ways_to_drive_the_runner_are_measured(processes: dict[str, Process]) -> None:
    asked = prompts(4, LENGTH, seed=1, vocab_size=500)
    for process in processes.values():
        process.fill(asked)
    samples = in_turn(processes, 2, lambda one, _: one.share(4))
    found = {name: process.clear() for name, process in processes.items()}
    assert found["vllm"] == found["vllm_alone"]
    for many in samples.values():
        assert len(many) == 2
        assert all(0 < one["runner"] < one["cpu"] for one in many)
