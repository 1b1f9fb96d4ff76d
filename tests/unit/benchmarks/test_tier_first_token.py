"""Time to the first token of reloaded prompts: they come from the tier, and the answers agree."""

import json
from pathlib import Path

import pytest

from benchmarks.engine.checkpoint import make_checkpoint
from benchmarks.tiers import first_token


def test_a_line_per_tier_and_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny", num_layers=6, hidden_size=64, vocab_size=512)
    first_token.measure(tmp_path, 1, [1024], checkpoint, vocab_size=512)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = [line["name"] for line in lines]
    assert names == ["tiers/first token/host/1024 tokens", "tiers/first token/disk/1024 tokens"]
    assert all(line["target"] is None for line in lines)


def test_a_prompt_that_was_not_reloaded_is_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny", num_layers=6, hidden_size=64, vocab_size=512)
    monkeypatch.setattr(first_token, "TIERS", {"host": "host?size=64KiB"})
    with pytest.raises(AssertionError, match=r"were found|came from the tier"):
        first_token.measure(tmp_path, 1, [1024], checkpoint, vocab_size=512)
