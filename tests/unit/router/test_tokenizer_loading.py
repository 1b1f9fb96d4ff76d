"""A checkpoint's tokenizer in a process without torch is the same as in one with it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint

ROOT = Path(__file__).parents[3]
CLASSES = {
    "TokenizersBackend": "gemma3",
    "PreTrainedTokenizerFast": "llama",
    "Qwen2Tokenizer": "qwen3",
    "LlamaTokenizer": "mistral",
}
"""As checkpoints name them, with a family; some of them build what tokenizer.json holds anew."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A checkpoint for each class."""
    found = []
    for name, family in CLASSES.items():
        path = make_checkpoint(tmp_path_factory.mktemp(name), family, num_layers=1)
        file = path / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": name}))
        found.append(str(path))
    return found


def said(how: str, directories: list[str]) -> tuple[dict[str, Any], str]:
    """What a process of its own says of them, and its standard error."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.unit.router.tokenizer_facts", how, *directories],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(ended.stdout), ended.stderr


def test_a_tokenizer_is_the_same_without_torch(directories: list[str]) -> None:
    without, errors = said("without", directories)
    assert not without["imported"]
    assert not without["to_be_had"]
    assert without["model_code"] == []
    assert "PyTorch" not in errors
    # Negative control: transformers takes torch where it finds it, and the check sees it.
    with_torch, _ = said("with", directories)
    assert with_torch["imported"]
    for name, one, other in zip(CLASSES, without["facts"], with_torch["facts"], strict=True):
        assert one == other, name
        assert len(one["chats"][0]) > 5
    # They are not all one class, or the test would show little.
    assert len({one["class"] for one in without["facts"]}) > 1
