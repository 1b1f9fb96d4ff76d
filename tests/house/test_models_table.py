"""docs/models.md says what the code and the tests say."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"


def check(page: Path) -> tuple[int, str]:
    # A process of its own: pytest cannot collect within a collection of itself.
    command = [sys.executable, "docs/make_models.py", "--check", "--out", str(page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    return done.returncode, done.stderr


def test_the_page_is_up_to_date() -> None:
    assert check(PAGE) == (0, "")


@pytest.mark.parametrize("said", ["| MistralForCausalLM |", "| `quantization_config` |"])
def test_a_page_that_says_something_else_is_seen(tmp_path: Path, said: str) -> None:
    changed = tmp_path / "models.md"
    assert said in PAGE.read_text()
    changed.write_text(PAGE.read_text().replace(said, "| another |"))
    status, message = check(changed)
    assert status == 1
    assert "is outdated" in message
