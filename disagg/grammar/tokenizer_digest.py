"""What a checkpoint's token ids mean, as one text: equal where its router may speak for it."""

import hashlib
import json
from pathlib import Path
from typing import Any

_APART = ("version", "truncation", "padding")
"""Of tokenizer.json: the format's release, and what routers do not use."""


def tokenizer_digest(model_dir: str | Path) -> str:
    """Digest of the tokenizer and of the size of the model's vocabulary.

    How the file is written (order, white space) does not matter. "" where the checkpoint has no
    tokenizer.json that can be read: nothing can be said of its ids then.
    """
    path = Path(model_dir)
    try:
        tokenizer = json.loads((path / "tokenizer.json").read_bytes())
        config = json.loads((path / "config.json").read_bytes())
        text_config = config.get("text_config") or {}
        size = config.get("vocab_size") or text_config.get("vocab_size") or 0
        told: dict[str, Any] = {k: v for k, v in tokenizer.items() if k not in _APART}
    except (OSError, ValueError, AttributeError):
        return ""
    canonical = json.dumps([size, told], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
