"""The command's promises, with a recipe of a few steps: real training, real files."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

import demo.train
from demo.checkpoint import MARKER, UNFINISHED_MARKER, read_marker
from demo.task import Difficulty
from demo.train import main, make_checkpoint
from demo.training import RECIPE, Recipe, Stage, attempt

SHORT = Recipe((Stage("few", Difficulty(4, 16, 24, 2, 0, True), 4, 4, 3, None),))


@pytest.fixture
def any_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps learn nothing; the writing is tested, not the learning."""
    monkeypatch.setattr(demo.train, "ACCURACY_TARGET", 0.0)
    monkeypatch.setattr(demo.train, "NUM_HELD_OUT_LISTS", 1)


def quiet() -> Console:
    return Console(file=io.StringIO())


def test_same_seed_same_weights_other_seed_other_weights() -> None:
    (first, _), (again, _), (other, _) = (attempt(SHORT, s, lambda _: None) for s in (5, 5, 6))
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not any(torch.equal(a, c) for a, _, c in pairs)


@pytest.mark.usefixtures("any_accuracy")
def test_checkpoint_loads_and_is_not_made_twice(tmp_path: Path) -> None:
    out = tmp_path / "new" / "checkpoint"
    made = make_checkpoint(out, 0, SHORT, quiet())
    assert made is not None
    assert read_marker(out) == made
    assert not (out / UNFINISHED_MARKER).exists()

    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert model.dtype == torch.float32
    assert set(model.config.layer_types) == {"sliding_attention", "full_attention"}
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.bos_token_id == tokenizer("redfox=").input_ids[0]
    assert tokenizer.chat_template

    before = (out / "model.safetensors").stat().st_mtime_ns
    assert make_checkpoint(out, 0, SHORT, quiet()) == made
    assert (out / "model.safetensors").stat().st_mtime_ns == before
    # Negative controls: another seed, or another recipe, is another checkpoint.
    assert make_checkpoint(out, 1, SHORT, quiet()) != made
    longer = replace(SHORT, stages=(replace(SHORT.stages[0], steps_max=4),))
    assert make_checkpoint(out, 1, longer, quiet()) != make_checkpoint(out, 1, SHORT, quiet())


@pytest.mark.usefixtures("any_accuracy")
def test_half_written_directory_is_remade(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path, 0, SHORT, quiet())
    (tmp_path / MARKER).rename(tmp_path / UNFINISHED_MARKER)
    (tmp_path / "model.safetensors").write_bytes(b"half")
    assert read_marker(tmp_path) is None
    assert make_checkpoint(tmp_path, 0, SHORT, quiet()) == made
    AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["thesis.txt", "model.safetensors"])
def test_directories_of_others_are_refused_untouched(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text("precious")
    assert main(["--out", str(tmp_path)], SHORT) == 2
    assert name in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "precious"


def test_an_unfinished_checkpoint_with_a_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / UNFINISHED_MARKER).touch()
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "thesis.txt").touch()
    assert main(["--out", str(tmp_path)], SHORT) == 2
    assert len(list(tmp_path.iterdir())) == 3


def test_a_file_as_directory_is_refused(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("precious")
    assert main(["--out", str(taken)], SHORT) == 2
    assert taken.read_text() == "precious"


def test_a_missed_target_tries_the_next_seed_and_ships_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo.train, "NUM_HELD_OUT_LISTS", 1)
    assert main(["--out", str(tmp_path), "--seed", "7"], SHORT) == 1
    printed = capsys.readouterr().out
    assert "seed 7 missed the target" in printed
    assert "seed 8 missed the target" in printed
    assert "0.000 of 7 whole answers right" in printed
    assert not (tmp_path / "model.safetensors").exists()
    assert read_marker(tmp_path) is None


def test_a_stage_that_is_not_mastered_ends_the_attempt() -> None:
    hard = replace(SHORT.stages[0], accuracy_target=1.0)
    seen: list[str] = []
    never = replace(hard, name="never reached")
    _, finished = attempt(
        Recipe((hard, never)), 0, lambda progress: seen.append(progress.stage.name)
    )
    assert not finished
    assert seen == ["few"] * 3
    _, finished = attempt(SHORT, 0, lambda _: None)
    assert finished


def test_marker_is_plain_json_and_stage_names_are_unique(tmp_path: Path) -> None:
    assert len({stage.name for stage in RECIPE.stages}) == len(RECIPE.stages)
    for text in ("", "[]", '{"recipe": 1}', json.dumps({"unknown": 0})):
        (tmp_path / MARKER).write_text(text)
        assert read_marker(tmp_path) is None
