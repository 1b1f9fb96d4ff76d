"""The choices of one client request: several generations, started, read and ended together."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from disagg.errors import CancelledError, DisaggError
from disagg.router.client_stream import ClientStream
from disagg.router.dispatch import Dispatcher
from disagg.router.text_stream import Piece
from disagg.routing.actions import NewRequest

SHARED_AFTER_TOKENS = 2
"""Tokens of a prompt's first choice after which the others start. The second one comes from the
decode worker: by then both workers have the prompt's blocks, and the others find them there."""
SEEDS = 2**64

Texts = Callable[[ClientStream], AsyncGenerator[Piece, None]]


class Choices:
    """``num_each`` generations of each prompt, numbered prompt by prompt.

    Each is a request of its own, with its own id and seed: it is planned, moved and replayed
    elsewhere like any other. They end together, when one fails or when the client leaves.

    A prompt is computed once: its first choice starts first, the others when they can find its
    blocks in the prefix caches. A prompt that fills no block leaves nothing to find: all of its
    choices start at once.

    Args:
        dispatcher: generates.
        prompts: a request for each. The first one's id is that of the client's request; several
            choices append their index to it.
        num_each: choices of each prompt.
        texts: decodes a stream.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        prompts: Sequence[NewRequest],
        num_each: int,
        texts: Texts,
    ) -> None:
        self.prompts = prompts
        self.num_tokens = 0
        """Generated and read so far."""
        self._dispatcher = dispatcher
        self._num_each = num_each
        self._texts = texts
        self._streams: dict[int, ClientStream] = {}
        self._why_ended = ""
        self._readers: set[asyncio.Task[None]] = set()
        # Where the client reads slowly each reader waits with one piece. What comes behind it stays
        # in its ClientStream, whose bounds hold.
        self._ready: asyncio.Queue[tuple[int, Piece] | Exception] = asyncio.Queue(1)

    def __len__(self) -> int:
        return len(self.prompts) * self._num_each

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompts, as their first choices found them."""
        found = 0
        for number, prompt in enumerate(self.prompts):
            record = self._dispatcher.core.record(self._request(number * self._num_each).request_id)
            found += min(record.cached_tokens, len(prompt.token_ids)) if record is not None else 0
        return found

    async def start(self) -> None:
        """Start what waits for nothing.

        Raises:
            DisaggError: one cannot be served; those before it were ended.
        """
        try:
            for number, prompt in enumerate(self.prompts):
                self._generate(number * self._num_each)
                if not _leaves_blocks(prompt):
                    self._start_others(number)
                await asyncio.sleep(0)  # others need not wait until all have been planned
        except BaseException:
            self.cancel("another choice was refused")
            raise

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Read all choices, each piece with its choice's index, in the order in which they come.

        Raises:
            DisaggError: a choice failed, and all were ended.
        """
        try:
            if len(self) == 1:
                async with aclosing(self._texts(self._streams[0])) as texts:
                    async for piece in texts:
                        self.num_tokens += len(piece.token_ids)
                        yield 0, piece
                return
            for index in self._streams:
                self._read_soon(index)
            num_live = len(self)
            while num_live:
                item = await self._ready.get()
                if isinstance(item, Exception):
                    raise item
                index, piece = item
                self.num_tokens += len(piece.token_ids)
                num_live -= bool(piece.finish_reason)
                yield index, piece
        except DisaggError:
            self.cancel("another choice failed")
            raise
        finally:
            for reader in self._readers:
                reader.cancel()
            await asyncio.gather(*self._readers, return_exceptions=True)

    def cancel(self, reason: str) -> None:
        """End what still runs, and start nothing more; idempotent."""
        self._why_ended = self._why_ended or reason
        for stream in self._streams.values():
            stream.cancel(reason)

    def _request(self, index: int) -> NewRequest:
        number, nth = divmod(index, self._num_each)
        prompt = self.prompts[number]
        if len(self) == 1:
            return prompt
        sampling = replace(prompt.sampling, seed=_following(prompt.sampling.seed, nth))
        if nth:  # the first one says what there is to say of the prompt
            sampling = replace(sampling, num_prompt_logprobs=None)
        return replace(
            prompt,
            request_id=f"{self.prompts[0].request_id}-{index}",
            sampling=sampling,
            claim=_claim_of(prompt.claim, index),
        )

    def _generate(self, index: int) -> None:
        if self._why_ended:
            raise CancelledError(self._why_ended)
        self._streams[index] = self._dispatcher.generate(self._request(index))

    def _start_others(self, number: int) -> list[int]:
        """Start all choices of a prompt but its first; returns which ones these are."""
        first = number * self._num_each
        others = list(range(first + 1, first + self._num_each))
        for index in others:
            self._generate(index)
        return others

    def _read_soon(self, index: int) -> None:
        self._readers.add(asyncio.create_task(self._read(index)))

    async def _read(self, index: int) -> None:
        number, nth = divmod(index, self._num_each)
        others_wait = not nth and _leaves_blocks(self.prompts[number])
        num_tokens = 0
        try:
            async with aclosing(self._texts(self._streams[index])) as texts:
                async for piece in texts:
                    num_tokens += len(piece.token_ids)
                    if others_wait and (piece.finish_reason or num_tokens >= SHARED_AFTER_TOKENS):
                        others_wait = False
                        for other in self._start_others(number):
                            self._read_soon(other)
                    await self._ready.put((index, piece))
        except Exception as error:
            await self._ready.put(error)


def _leaves_blocks(prompt: NewRequest) -> bool:
    """Whether other choices of a prompt have something to wait for."""
    return bool(prompt.hashes) or prompt.sampling.num_prompt_logprobs is not None


def _claim_of(claim: bytes, index: int) -> bytes:
    """The name of a choice at all routers: prompts of one list may be equal, choices are not."""
    if not claim:
        return claim
    return hashlib.blake2b(index.to_bytes(8, "little"), key=claim, digest_size=len(claim)).digest()


def _following(seed: int, nth: int) -> int:
    """The seed of a prompt's ``nth`` choice; 64 bits with a sign, as every seed."""
    return (seed + nth + SEEDS // 2) % SEEDS - SEEDS // 2
