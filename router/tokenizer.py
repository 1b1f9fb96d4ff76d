"""Text to tokens and back: one checkpoint's tokenizer, its chat template, its sampling defaults."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from disagg.grammar.compiler import GrammarCompiler
from disagg.grammar.tokenizer_digest import tokenizer_digest
from disagg.kv.shapes.config_fields import text_part
from disagg.router.chat import Chat
from disagg.router.chat_template import GEMMA_TOOLS, ChatTemplate
from disagg.router.detokenizer import Detokenizer, Vocabulary
from disagg.router.message_parts.call_parser import Schemas
from disagg.router.message_parts.formats import AUTO, GEMMA, family_of
from disagg.router.message_parts.message_parser import MessageParser
from disagg.router.message_parts.message_syntax import MessageSyntax
from disagg.router.template_bounds import CHARS_MAX
from disagg.router.tokenizer_loading import load_tokenizer
from disagg.tls.given_file import read_given

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
JSON_BYTES_MAX = 1 << 24
"""Of config.json and generation_config.json; where weights are quantized the first has lists."""
PROMPT_END_TOKENS = 16
"""Enough for a tag that is spelt out, and line breaks."""


class Tokenizer:
    """The tokenizer of a checkpoint directory. Encoding is safe from several threads.

    Attributes:
        digest: of what its ids mean, see `tokenizer_digest`.
        vocab_size: token ids the model accepts are below it.
        eos_token_ids: tokens that end a generation unless the request ignores them.
        sampling_defaults: what generation_config.json has of ``SAMPLING_DEFAULTS``.
        token_chars_max: length of the longest token's text, which bounds a prompt's characters.
        grammars: compiles what answers must match.
        messages: how the model writes calls of tools and reasoning.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        chat_template: str = "",
        tool_call_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        prompt_chars_max: int = CHARS_MAX,
    ) -> None:
        """Load from disk; nothing is downloaded.

        Args:
            model_dir: the checkpoint.
            chat_template: a file with another chat template than the checkpoint's.
            tool_call_parser: see `MessageSyntax`.
            reasoning_parser: see `MessageSyntax`.
            prompt_chars_max: what a chat template may write.

        Raises:
            ConfigError: the directory holds no usable tokenizer or config, or the template or the
                parsers cannot be used.
        """
        path = Path(model_dir)
        config = _read_json(path / "config.json")
        text_config = text_part(config)
        model_type = str(config.get("model_type", ""))
        generation_file = path / "generation_config.json"
        generation = _read_json(generation_file) if os.path.lexists(generation_file) else {}
        try:
            self._tokenizer: Any = load_tokenizer(path)
        except Exception as error:  # transformers raises many kinds here
            is_there = (path / "tokenizer.json").is_file()
            said = error if is_there else "tokenizer.json is missing there"
            raise ConfigError(f"no usable tokenizer in {path}: {said}", param="model") from error
        self._backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._backend is None:
            raise ConfigError(f"{path} has no tokenizer.json (fast tokenizer)", param="model")
        added = self._backend.get_added_tokens_decoder().values()
        # Where its files are missing, transformers makes an empty one of the model's class. Its
        # size says so; to read a large vocabulary takes 0.3 s of the router's start.
        if self._backend.get_vocab_size(with_added_tokens=True) <= len(added):
            raise ConfigError(
                f"no usable tokenizer in {path}: it knows no token that is text; tokenizer.json or"
                " what it is made of is missing there",
                param="model",
            )
        # Both could be set in tokenizer.json and would silently cut or pad prompts.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._vocabulary = Vocabulary(self._backend)
        family = family_of(model_type)
        writes_as_gemma = tool_call_parser == GEMMA or (
            tool_call_parser == AUTO and family is not None and family.tools == GEMMA
        )
        self._template = ChatTemplate(
            self._tokenizer,
            chat_template,
            GEMMA_TOOLS if writes_as_gemma else None,
            prompt_chars_max,
        )
        self.messages = MessageSyntax(
            model_type,
            self._template.text,
            self._backend.token_to_id,
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
        )
        special = frozenset(token.content for token in added if token.special)
        self._vocabulary_of_all = Vocabulary(self._backend, special)
        self._vocabulary_with_marks = Vocabulary(self._backend, frozenset(self.messages.marks))
        self.grammars = GrammarCompiler(path)
        self.digest = tokenizer_digest(path)
        vocab: dict[str, int] = self._backend.get_vocab(True)
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

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Tokenise a plain prompt, with the special tokens the tokenizer adds itself or not."""
        # Without the offsets of tokens in the text, which `encode` adds: a third of the time.
        (found,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(found.ids)

    def encode_chat(
        self, chat: Chat, *, add_special_tokens: bool = False, add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """Render the chat template, ready for the assistant's answer or not, and tokenise it.

        Raises:
            RequestError: see ``ChatTemplate.render``.
        """
        text = self._template.render(chat, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""
        return self._vocabulary.decode(token_ids)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones by name."""
        return str(self._backend.decode(token_ids, skip_special_tokens=False))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, special tokens by name; empty for an unused id."""
        return self._vocabulary.token_bytes(token_id)

    def shows(self, token_id: int, *, skip_special_tokens: bool = True) -> bool:
        """Whether texts have a token: it exists and is not a special one to be skipped."""
        vocabulary = self._vocabulary if skip_special_tokens else self._vocabulary_of_all
        return vocabulary.shows(token_id)

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int],
        *,
        with_marks: bool = False,
        skip_special_tokens: bool = True,
    ) -> Detokenizer:
        """Start decoding what follows a prompt.

        Special tokens have no text, but for the marks of the model's messages ``with_marks``, or
        all of them if none is skipped.
        """
        vocabulary = self._vocabulary_with_marks if with_marks else self._vocabulary
        if not skip_special_tokens:
            vocabulary = self._vocabulary_of_all
        return vocabulary.detokenizer(prompt_token_ids)

    def end_of(self, prompt_token_ids: Sequence[int]) -> str:
        """The last characters of a prompt, special tokens by name."""
        last = prompt_token_ids[-PROMPT_END_TOKENS:]
        return b"".join(map(self.token_bytes, last)).decode(errors="replace")

    def message_parser(
        self, prompt_token_ids: Sequence[int], schemas: Schemas
    ) -> MessageParser | None:
        """See ``MessageSyntax.parser``."""
        if not (self.messages.reasoning or (self.messages.tools and schemas)):
            return None  # whatever the prompt ends with
        return self.messages.parser(self.end_of(prompt_token_ids), schemas)


def _token_ids(value: object) -> set[int]:
    if isinstance(value, int):
        return {value}
    if isinstance(value, list):
        return {item for item in value if isinstance(item, int)}
    return set()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_given(path, JSON_BYTES_MAX)[0])
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", param="model") from error
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: {error}", param="model") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object", param="model")
    return value
