"""Loads the tokenizer of a checkpoint by transformers, which can do that without torch."""

import logging
import sys
from pathlib import Path
from typing import Any

_WITHOUT_TORCH = "PyTorch was not found"


def do_without_torch() -> None:
    """Make this process one in which torch is not installed; does nothing where it is imported.

    transformers imports torch for its configurations wherever it finds it: seconds and 190 MiB for
    a process that computes nothing. Without it transformers offers tokenizers, configurations and
    chat templates alone. To be called before transformers is imported, by who owns the process.
    """
    if "torch" in sys.modules:
        return
    # What Python's documentation names for this: it is not found, and importing it is an error.
    sys.modules["torch"] = None  # type: ignore[assignment]
    logging.getLogger("transformers").addFilter(_is_news)


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of transformers for a checkpoint directory; nothing is downloaded.

    Raises:
        Exception: transformers raises many kinds here.
    """
    # Not at the top: it reads thousands of files, and only the start of a router needs it.
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def _is_news(record: logging.LogRecord) -> bool:
    return _WITHOUT_TORCH not in record.getMessage()
