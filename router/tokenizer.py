"""Text to tokens and back: one checkpoint's tokenizer, its chat template, its sampling defaults."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from disagg.errors import ConfigError, RequestError
from disagg.grammar.compiler import GrammarCompiler
from disagg.router.detokenizer import Detokenizer, Vocabulary

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Tokenizer:
    """The tokenizer of a checkpoint directory. Encoding is safe from several threads.

    Attributes:
        vocab_size: token ids the model accepts are below it.
        eos_token_ids: tokens that end a generation unless the request ignores them.
        sampling_defaults: what generation_config.json has of ``SAMPLING_DEFAULTS``.
        token_chars_max: length of the longest token's text, which bounds a prompt's characters.
        grammars: compiles what answers must match.
    """

    def __init__(self, model_dir: str | Path) -> None:
        """Load from disk; nothing is downloaded.

        Raises:
            ConfigError: the directory holds no usable tokenizer or config.
        """
        path = Path(model_dir)
        config = _read_json(path / "config.json")
        generation_file = path / "generation_config.json"
        generation = _read_json(generation_file) if generation_file.is_file() else {}
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except Exception as error:  # transformers raises many kinds here
            raise ConfigError(f"no usable tokenizer in {path}: {error}", param="model") from error
        self._backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._backend is None:
            raise ConfigError(f"{path} has no tokenizer.json (fast tokenizer)", param="model")
        # Both could be set in tokenizer.json and would silently cut or pad prompts.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._vocabulary = Vocabulary(self._backend)
        self.grammars = GrammarCompiler(path)
        vocab: dict[str, int] = self._backend.get_vocab(True)
        text_config = config.get("text_config") or {}
        self.vocab_size: int = (
            config.get("vocab_size") or text_config.get("vocab_size") or len(vocab)
        )
        self.token_chars_max: int = max(map(len, vocab))
        eos: set[int] = set()
        for value in (config.get("eos_token_id"), text_config.get("eos_token_id")):
            eos |= _token_ids(value)
        if "eos_token_id" in generation:
            eos = _token_ids(generation["eos_token_id"])
        if self._tokenizer.eos_token_id is not None:
            eos.add(int(self._tokenizer.eos_token_id))
        self.eos_token_ids: tuple[int, ...] = tuple(sorted(eos))
        self.sampling_defaults: dict[str, float] = {
            name: generation[name]
            for name in SAMPLING_DEFAULTS
            if isinstance(generation.get(name), int | float)
        }

    @property
    def has_chat_template(self) -> bool:
        """Whether chat completions can be served."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokenise a plain prompt, with the special tokens the tokenizer adds itself."""
        return tuple(self._backend.encode(text, add_special_tokens=True).ids)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """Render the chat template, ready for the assistant's answer, and tokenise it.

        Raises:
            RequestError: the model has no template, or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise RequestError(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise whatever they like
            raise RequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""
        return self._vocabulary.decode(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, special tokens by name; empty for an unused id."""
        return self._vocabulary.token_bytes(token_id)

    def shows(self, token_id: int) -> bool:
        """Whether `decode` leaves a token in: it exists and is not special."""
        return self._vocabulary.shows(token_id)

    def detokenizer(self, prompt_token_ids: Sequence[int]) -> Detokenizer:
        """Start decoding what follows a prompt."""
        return self._vocabulary.detokenizer(prompt_token_ids)


def _token_ids(value: object) -> set[int]:
    if isinstance(value, int):
        return {value}
    if isinstance(value, list):
        return {item for item in value if isinstance(item, int)}
    return set()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}", param="model") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object", param="model")
    return value
