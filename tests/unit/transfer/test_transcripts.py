"""Transcripts: the whole conversation, reviewed as text.

``DISAGG_REWRITE_TRANSCRIPTS=1`` writes what is said now into the files; review the diff.
"""

import os
from pathlib import Path

import pytest

from tests.unit.transfer.transcript import Play

FILES = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


def played(text: str) -> str:
    """The transcript with its answers as they are now."""
    play, parts = Play(), []
    for part in text.strip().split("\n\n"):
        head, *_ = part.split("\n----")
        command = head.splitlines()[-1]
        parts.append("\n".join([head, "----", *play.command(command)]))
    return "\n\n".join(parts) + "\n"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_transcript(file: Path) -> None:
    now = played(file.read_text())
    if os.environ.get("DISAGG_REWRITE_TRANSCRIPTS") == "1":
        file.write_text(now)
    assert file.read_text() == now


def test_a_changed_answer_is_noticed() -> None:
    text = FILES[0].read_text()
    assert played(text.replace("ok=True", "ok=False")) == text
    assert "ok=True" in text


def test_there_are_transcripts() -> None:
    assert len(FILES) == 5
