"""What a router takes of a tokenizer, said by a process of its own.

``python -m tests.unit.router.tokenizer_facts with|without DIRECTORY…``: with torch, or without as a
router is; one JSON object.
"""

import json
import sys
from pathlib import Path

from disagg.router.chat import Chat
from disagg.router.tokenizer import Tokenizer
from disagg.router.tokenizer_loading import do_without_torch

CHATS = (
    ({"role": "user", "content": "naïve café — 5 €"},),
    ({"role": "system", "content": "short"}, {"role": "user", "content": "<|end|> hi"}),
)
TEXTS = ("plain  words here", "日本語 👩‍👩‍👧‍👦", "<bos><|user|>")


def facts(path: Path) -> dict[str, object]:
    """All that counts of one checkpoint's tokenizer."""
    tokenizer = Tokenizer(path)
    return {
        "class": type(tokenizer._tokenizer).__name__,
        "backend": json.loads(tokenizer._backend.to_str()),
        "chats": [tokenizer.encode_chat(Chat(chat)) for chat in CHATS],
        "texts": [tokenizer.encode(text) for text in TEXTS],
        "ends": tokenizer.eos_token_ids,
        "size": tokenizer.vocab_size,
        "digest": tokenizer.digest,
        "template": tokenizer._template.text,
    }


def is_to_be_had(name: str) -> bool:
    """Whether this process can import a package."""
    try:
        __import__(name)
    except ModuleNotFoundError:
        return False
    return True


if __name__ == "__main__":
    if sys.argv[1] == "without":
        do_without_torch()
    all_facts = [facts(Path(argument)) for argument in sys.argv[2:]]
    model_code = [
        name
        for name in sys.modules
        if name.startswith("transformers.models.") and ".modeling_" in name
    ]
    imported = "torch" in sys.modules and sys.modules["torch"] is not None
    said = {"facts": all_facts, "imported": imported, "model_code": model_code}
    print(json.dumps(said | {"to_be_had": is_to_be_had("torch")}))
