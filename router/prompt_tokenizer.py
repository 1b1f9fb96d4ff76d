"""A prompt's tokens and block hashes, within bounds; in threads where it is long."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from disagg.errors import ContextLengthError, RequestError
from disagg.router.chat import Chat
from disagg.router.fair_threads import FairThreads
from disagg.router.generation_request import Prompt
from disagg.router.options import RouterOptions
from disagg.router.tokenizer import Tokenizer
from disagg.routing.fair_queue import parse_weights
from disagg.routing.revisions import Revision

UTF8_BYTES_MAX = 4
"""Of one character."""
INLINE_CHARS_MAX = 2_000
"""Shorter prompts are tokenised on the event loop; a thread costs more."""
THREADS = 2
_T = TypeVar("_T")


class PromptTokenizer:
    """Refuses what cannot fit before it is tokenised. Used from one event loop."""

    def __init__(self, options: RouterOptions, tokenizer: Tokenizer) -> None:
        self._options = options
        self._tokenizer = tokenizer
        weights = parse_weights(options.tenant_weights)
        self._threads = FairThreads(THREADS, options.requests_max, weights)

    def close(self) -> None:
        """End the threads."""
        self._threads.close()

    async def tokens(
        self,
        prompt: Prompt,
        field: str,
        limit: int,
        salt: bytes,
        tenant: str,
        add_special_tokens: bool | None = None,
        *,
        revisions: Sequence[Revision],
    ) -> tuple[tuple[int, ...], list[list[bytes]]]:
        """Tokens of a prompt, and its block hashes by revision; in a thread when it is long.

        See ``GenerationRequest.add_special_tokens``.

        Raises:
            RequestError: an id outside the vocabulary, or a prompt certainly too long.
            CapacityError: too many requests are being prepared.
        """
        size = self.check_size(prompt, field, limit)
        work = partial(self._tokens, prompt, field, salt, add_special_tokens, revisions)
        inline = size <= INLINE_CHARS_MAX
        token_ids, hashes = work() if inline else await self.in_thread(tenant, size, work)
        most, why = self._tokens_max(limit)
        if why and len(token_ids) > most:
            raise ContextLengthError(
                f"has {len(token_ids)} tokens; {most} are possible{why}", param=field
            )
        return token_ids, hashes

    async def in_thread(self, tenant: str, size: int, work: Callable[[], _T]) -> _T:
        """Do what takes longer than a thread costs; see `FairThreads.run`."""
        return await self._threads.run(tenant, max(size, 1), work)

    def check_size(self, prompt: Prompt, field: str, limit: int) -> int:
        """Refuse a prompt that is not worth tokenising; returns its characters, or its token ids.

        Raises:
            RequestError: it has more text than is taken.
            ContextLengthError: it cannot fit.
        """
        if isinstance(prompt, tuple):
            size, per_unit = len(prompt), 1
        else:
            texts = (prompt,) if isinstance(prompt, str) else prompt.texts
            size, per_unit = sum(map(len, texts)), self._tokenizer.token_chars_max
            if size * UTF8_BYTES_MAX > self._options.prompt_bytes_max:
                self._check_bytes(texts, field)
        most, why = self._tokens_max(limit)
        if size > most * per_unit:
            raise ContextLengthError(f"is too long; {most} tokens are possible{why}", param=field)
        return size

    def check_ids(self, token_ids: Sequence[int], field: str) -> None:
        """Raise RequestError, naming ``field``, where an id is none of the vocabulary."""
        # An id the model lacks would fail the step of every sequence in the batch.
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._tokenizer.vocab_size:
            raise RequestError(
                f"token ids must be from 0 to {self._tokenizer.vocab_size - 1}", param=field
            )

    def _tokens_max(self, limit: int) -> tuple[int, str]:
        """What a prompt may have at most, and the setting that says so if it is one."""
        own = self._options.prompt_tokens_max
        return (own, " (limits.prompt_tokens_max)") if 0 < own < limit else (limit, "")

    def _check_bytes(self, texts: Sequence[str], field: str) -> None:
        """Raise RequestError for more text than is worth looking at; token ids have their own."""
        num_bytes = sum(len(text.encode()) for text in texts)
        if num_bytes > self._options.prompt_bytes_max:
            raise RequestError(
                f"has {num_bytes} bytes, at most {self._options.prompt_bytes_max} are taken "
                "(limits.prompt_bytes_max)",
                param=field,
            )

    def _tokens(
        self,
        prompt: Prompt,
        field: str,
        salt: bytes,
        add_special: bool | None,
        revisions: Sequence[Revision],
    ) -> tuple[tuple[int, ...], list[list[bytes]]]:
        token_ids: tuple[int, ...]
        if isinstance(prompt, str):
            special = add_special is not False
            token_ids = self._tokenizer.encode(prompt, add_special_tokens=special)
        elif isinstance(prompt, Chat):
            special = bool(add_special)
            token_ids = self._tokenizer.encode_chat(prompt, add_special_tokens=special)
        else:
            token_ids = prompt
        if not token_ids:
            raise RequestError("has no tokens", param=field)
        self.check_ids(token_ids, field)
        return token_ids, [revision.hashes(token_ids, salt) for revision in revisions]
