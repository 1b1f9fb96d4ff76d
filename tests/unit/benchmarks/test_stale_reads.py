"""What the benchmark of stale reads asks, counts and calls right."""

from pathlib import Path
from random import Random
from typing import cast

import pytest
import torch

from benchmarks.stale_reads import __main__ as program
from benchmarks.stale_reads.__main__ import (
    AGAIN,
    LATE,
    NO_COMMIT,
    NO_FAULT,
    ROWS,
    is_as_it_must_be,
)
from benchmarks.stale_reads.checkpoint import HEAD_SIZE, widen_heads
from benchmarks.stale_reads.ours import Ours
from benchmarks.stale_reads.peer import plan
from benchmarks.stale_reads.questions import (
    VALUES_ASKED,
    VALUES_OF_OTHERS,
    Prompt,
    Prompts,
    Tally,
    draw_prompt,
)
from demo.model import build_model
from demo.task import VOCABULARY
from disagg.tls.addresses import parse_ports

ROOT = Path("/")


def test_wider_heads_compute_the_same() -> None:
    torch.manual_seed(0)
    narrow = build_model(0).train(False)
    with torch.no_grad():
        for name, weight in narrow.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(-0.5, 0.5)
    config = type(narrow.config)(**(narrow.config.to_dict() | {"head_dim": HEAD_SIZE}))
    wide = type(narrow)(config).train(False)
    wide.load_state_dict(widen_heads(narrow.state_dict(), narrow.config.head_dim))
    token_ids = torch.randint(0, narrow.config.vocab_size, (2, 50))
    with torch.no_grad():
        ours, theirs = narrow(token_ids).logits, wide(token_ids).logits
        assert torch.allclose(ours, theirs, atol=1e-4)
        # Control: elsewhere in the head the angles are others.
        moved = {
            name: weight.roll(1, 0) if "q_proj" in name else weight
            for name, weight in wide.state_dict().items()
        }
        wide.load_state_dict(moved)
        assert not torch.allclose(ours, wide(token_ids).logits, atol=1e-4)


def test_the_answer_lies_far_back_in_the_prompt_and_nowhere_else() -> None:
    words = [VOCABULARY[token] for token in draw_prompt(Random(0), VALUES_ASKED).token_ids]
    prompt = draw_prompt(Random(0), VALUES_ASKED)
    first, *rest = prompt.answer.replace(words[-5], " ").split()
    place = words.index(first)
    assert words[place - 1] == words[-4]  # the key that is asked
    assert words[place : place + 1 + len(rest)] == [first, *rest]
    assert words.count(first) == 1
    assert len(words) - place > 20  # outside the window
    assert not set(words) & set(VALUES_OF_OTHERS)
    assert len(words) == 169


def test_answers_are_right_wrong_or_another_users() -> None:
    prompt, tally = Prompt((1,), "7plus41"), Tally()
    for text in (" 7 plus 41", "7 plus 42", f"7 plus {VALUES_OF_OTHERS[3]}", ""):
        tally.answered(prompt, text)
    tally.failed("500")
    assert (tally.rounds, tally.right, tally.wrong, tally.errors) == (5, 1, 3, 1)
    assert tally.of_others == 1


def test_what_must_be() -> None:
    right, wrong, none = Tally(right=3), Tally(right=3, wrong=1), Tally(errors=3)
    for name in (LATE, AGAIN, NO_FAULT):
        assert is_as_it_must_be(name, right, None)
        assert not is_as_it_must_be(name, wrong, None)
        assert not is_as_it_must_be(name, none, None), "only errors show nothing"
    assert is_as_it_must_be(NO_COMMIT, wrong, None)
    assert not is_as_it_must_be(NO_COMMIT, right, None), "a check that nothing needs"
    assert is_as_it_must_be(LATE, right, wrong)
    assert not is_as_it_must_be(NO_FAULT, right, wrong), "the peer was not set up well"


def test_there_are_a_thousand_rounds_with_faults() -> None:
    assert sum(row.ours for name, row in ROWS.items() if name not in (NO_FAULT, NO_COMMIT)) > 1000


def test_the_peers_defaults_are_left_alone() -> None:
    started = plan("owner", ROOT, 128)
    flags = " ".join(started.command(ROOT))
    assert "lease" not in flags
    assert "engine_id" not in flags
    assert not started.unhindered
    named = " ".join(plan("owner", ROOT, 128, 6, "fixed").command(ROOT))
    assert '"kv_lease_duration": 6' in named
    assert '"engine_id": "fixed"' in named


def test_it_can_be_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last run has left logs, and a folder of certificates."""
    monkeypatch.setattr(program, "DIRECTORY", tmp_path / "checkpoint")
    logs = program._logs("ours")
    (logs / "certificates" / "node").mkdir(parents=True)
    (logs / "router").touch()
    again = program._logs("ours")
    assert again != logs
    assert list(again.iterdir()) == []
    assert (logs / "router").exists()


def test_the_owners_port_is_one_that_a_worker_takes(tmp_path: Path) -> None:
    ours = Ours(tmp_path, tmp_path, cast(Prompts, None), strict=False)
    assert len(parse_ports(ours._port)) == 1
