"""Text to tokens and back: one checkpoint's tokenizer, its chat template, its sampling defaults."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from disagg.errors import ConfigError, RequestError

REPLACEMENT = "\ufffd"
HELD_CHARS_MAX = 3
"""Replacement characters an unfinished UTF-8 sequence can show as (one per byte at most)."""
WINDOW_TOKENS_MAX = 32
"""A window that ends in broken UTF-8 for so long is garbage and is emitted as it is."""
PROMPT_TAIL_TOKENS = 5
"""Prompt tokens decoded before the first new one, so that its leading space is kept."""


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, inverted (the ByteLevel decoder's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


class Tokenizer:
    """The tokenizer of a checkpoint directory. Encoding is safe from several threads.

    Attributes:
        vocab_size: token ids the model accepts are below it.
        eos_token_ids: tokens that end a generation unless the request ignores them.
        sampling_defaults: ``temperature``, ``top_p`` and ``top_k`` of generation_config.json.
        token_chars_max: length of the longest token's text, which bounds a prompt's characters.
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
        self._special_ids = frozenset(self._tokenizer.all_special_ids)
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
            for name in ("temperature", "top_p", "top_k")
            if isinstance(generation.get(name), int | float)
        }
        self._byte_of = _byte_alphabet() if "ByteLevel" in str(self._backend.decoder) else None
        self._token_bytes: dict[int, bytes] = {}

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
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, special tokens by name; empty for an unused id."""
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._token_bytes[token_id] = self._bytes_of(token_id)
        return known

    def _bytes_of(self, token_id: int) -> bytes:
        piece: str | None = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._special_ids:
            return piece.encode()
        if self._byte_of is not None:
            if all(char in self._byte_of for char in piece):
                return bytes(self._byte_of[char] for char in piece)
            return piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()

    def detokenizer(self, prompt_token_ids: Sequence[int]) -> "Detokenizer":
        """Start decoding what follows a prompt."""
        return Detokenizer(self.decode, prompt_token_ids[-PROMPT_TAIL_TOKENS:])


class Detokenizer:
    """Decodes token by token without ever showing an unfinished character.

    It decodes a short window: the tokens since the last but one place where the text was whole.
    Their left neighbours decide about leading spaces, so the window starts before the new tokens.
    Bounded work per token: the window is at most ``WINDOW_TOKENS_MAX`` long.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], tail: Sequence[int]) -> None:
        self._decode = decode
        self._window: list[int] = list(tail)
        self._num_whole = len(self._window)
        self._num_emitted_chars = _whole_chars(decode(self._window)) if tail else 0

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is final now; "" while a character is unfinished."""
        self._window.append(token_id)
        text = self._decode(self._window)
        end = len(text) if len(self._window) > WINDOW_TOKENS_MAX else _whole_chars(text)
        new = text[self._num_emitted_chars : end]
        if end == len(text):
            del self._window[: self._num_whole]
            self._num_whole = len(self._window)
            self._num_emitted_chars = len(self._decode(self._window))
        else:
            self._num_emitted_chars = max(self._num_emitted_chars, end)
        return new


def _whole_chars(text: str) -> int:
    """Length of the text without the replacement characters an unfinished sequence may show as."""
    end = len(text)
    while end > max(0, len(text) - HELD_CHARS_MAX) and text[end - 1] == REPLACEMENT:
        end -= 1
    return end


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
