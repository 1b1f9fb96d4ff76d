"""The choices of one client request: several generations, started, read and ended together."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Self

from disagg.errors import CancelledError
from disagg.messages.lazy import cached_property
from disagg.router.client_stream import ClientStream
from disagg.router.dispatch import Dispatcher
from disagg.router.observed_call import ObservedCall
from disagg.router.text_stream import Piece, TextReader, next_piece
from disagg.routing.actions import Deliver, NewRequest
from disagg.routing.record import RequestRecord

SHARED_AFTER_TOKENS = 2
"""Tokens of a prompt's first choice after which the others start. The second one comes from the
decode worker: by then both workers have the prompt's blocks, and the others find them there."""
SEEDS = 2**64

Texts = Callable[[NewRequest], TextReader]


class Choices:
    """``num_each`` generations of each prompt, numbered prompt by prompt.

    Each is a request of its own, with its own id and seed: it is planned, moved and replayed
    elsewhere like any other. They end together, when one fails or when the client leaves.

    A prompt is computed once: its first choice starts first, the others when they can find its
    blocks in the prefix caches. A prompt that fills no block leaves nothing to find: all of its
    choices start at once. All are accepted or none: those that start later have their places.

    What a client does not read is bounded for all choices together.

    Args:
        dispatcher: generates.
        prompts: a request for each. The first one's id is that of the client's request; several
            choices append their index to it.
        num_each: choices of each prompt.
        texts: reads the text of a request's stream.
        call: that they belong to.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        prompts: Sequence[NewRequest],
        num_each: int,
        texts: Texts,
        call: ObservedCall,
    ) -> None:
        self.prompts = prompts
        self.num_tokens = 0
        """Generated and read so far."""
        self._dispatcher = dispatcher
        self._group = dispatcher.new_group()
        self._num_each = num_each
        self._texts = texts
        self._call = call
        call.num_choices = len(self)
        self._streams: dict[int, ClientStream] = {}
        self._claim = _claim_together([prompt.claim for prompt in prompts])
        self._why_ended = ""
        self._readers: set[asyncio.Task[None]] = set()
        self._unread = dispatcher.unread()
        """Pieces count as unread until the client's answer takes them."""

    def __len__(self) -> int:
        return len(self.prompts) * self._num_each

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def num_cached_tokens(self) -> int:
        """See `ObservedCall`."""
        return self._call.num_cached_tokens

    @property
    def first_record(self) -> RequestRecord | None:
        """Of the first choice of the first prompt; None: it was too long ago."""
        return self._dispatcher.core.record(self._id_of(0))

    async def start(self) -> None:
        """Start what waits for nothing.

        Raises:
            DisaggError: one cannot be served; those before it were ended.
        """
        try:
            for number, prompt in enumerate(self.prompts):
                if number:  # others need not wait until all have been planned
                    await asyncio.sleep(0)
                self._check_lives()
                self._generate(number * self._num_each)
                if not _leaves_blocks(prompt):
                    self._start_others(number)
        except BaseException:
            self.cancel("another choice was refused")
            raise

    def pieces(self) -> "Pieces":
        """Read all choices, each piece with its choice's index, in the order in which they come.

        Raises:
            DisaggError: a choice failed, and all were ended.
        """
        return OnlyPieces(self) if len(self) == 1 else self._pieces()

    async def only_piece(self) -> Piece:
        """Read the next piece of an only choice."""
        piece = await next_piece(self._streams[0], self._only_reader)
        self.num_tokens += len(piece.token_ids)
        return piece

    async def _pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        try:
            for index in self._streams:
                self._read_soon(index)
            num_live = len(self)
            while num_live:
                item = await self._ready.get()
                if isinstance(item, Exception):
                    raise item
                index, piece = item
                self._unread.add(-len(piece.token_ids))
                self.num_tokens += len(piece.token_ids)
                num_live -= bool(piece.finish_reason)
                yield index, piece
        finally:
            for reader in self._readers:
                reader.cancel()
            if self._readers:
                await asyncio.gather(*self._readers, return_exceptions=True)

    def write_through(self, is_ready: Callable[[], bool], write: Callable[[Piece], None]) -> None:
        """Give the pieces of an only choice to ``write`` as they come, while ``is_ready``.

        `pieces` gives the others: the last one, those that come while it is not ready.
        """
        stream, reader = self._streams[0], self._only_reader
        if len(self) > 1 or reader.may_stop:
            return

        def take(delta: Deliver) -> bool:
            if delta.finish_reason or not is_ready():
                return False
            piece = reader.piece(delta)
            self.num_tokens += len(piece.token_ids)
            write(piece)
            return True

        stream.take_now(take)

    @cached_property
    def _ready(self) -> "asyncio.Queue[tuple[int, Piece] | Exception]":
        """Of several choices, with room for one piece of each: all of a step are read in a turn."""
        return asyncio.Queue(len(self))

    @cached_property
    def _only_reader(self) -> TextReader:
        """Of the first choice, where there is no other."""
        return self._texts(self._streams[0].request)

    def cancel(self, reason: str) -> None:
        """End what still runs, and start nothing more; idempotent."""
        self._why_ended = self._why_ended or reason
        self._dispatcher.free_places(self._group)
        for stream in self._streams.values():
            stream.cancel(reason)

    def _request(self, index: int) -> NewRequest:
        number, nth = divmod(index, self._num_each)
        prompt = self.prompts[number]
        if len(self) == 1:
            return prompt
        sampling = replace(prompt.sampling, seed=_following(prompt.sampling.seed, nth))
        received_ms, slo = prompt.received_ms, prompt.slo
        if index:  # once the first one goes its client's request has begun, and that is not shed
            slo = replace(slo, sheds=False)
        if nth:  # the first one says what there is to say of the prompt
            sampling = replace(sampling, num_prompt_logprobs=None)
            if _leaves_blocks(prompt):  # it has waited for the first one: its own time begins now
                received_ms = None
        return replace(
            prompt,
            request_id=self._id_of(index),
            sampling=sampling,
            claim=_claim_of(self._claim, index),
            group=self._group,
            num_following=0 if index else len(self) - 1,
            received_ms=received_ms,
            slo=slo,
            accepted_ms=self.prompts[0].received_ms,
        )

    def _id_of(self, index: int) -> str:
        request_id = self.prompts[0].request_id
        return request_id if len(self) == 1 else f"{request_id}-{index}"

    def _check_lives(self) -> None:
        """Raise why no more may start: a choice has failed, or the client is gone."""
        for stream in self._streams.values():
            if stream.failure is not None:
                raise stream.failure
        if self._why_ended:
            raise CancelledError(self._why_ended)

    def _generate(self, index: int) -> None:
        self._streams[index] = self._dispatcher.generate(
            self._request(index),
            self._call,
            self._unread,
            shares_prompt=bool(index % self._num_each),
        )

    def _start_others(self, number: int) -> list[int]:
        """Start all choices of a prompt but its first; returns which ones these are."""
        self._check_lives()
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
            stream, finish = self._streams[index], ""
            reader = self._texts(stream.request)
            while not finish:
                piece = await next_piece(stream, reader)
                finish = piece.finish_reason
                num_tokens += len(piece.token_ids)
                if others_wait and (finish or num_tokens >= SHARED_AFTER_TOKENS):
                    others_wait = False
                    for other in self._start_others(number):
                        self._read_soon(other)
                self._unread.add(len(piece.token_ids))
                await self._ready.put((index, piece))
        except Exception as error:
            self.cancel("another choice failed")  # whenever the client comes to hear of it
            await self._ready.put(error)


class OnlyPieces:
    """The pieces of an only choice; the event loop keeps account of each generator, not of this."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._has_ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Piece]:
        if self._has_ended:
            raise StopAsyncIteration
        piece = await self._choices.only_piece()
        self._has_ended = bool(piece.finish_reason)
        return 0, piece

    async def aclose(self) -> None:
        """As a generator's; there is nothing to end."""


Pieces = AsyncGenerator[tuple[int, Piece], None] | OnlyPieces
"""Each with its choice's index."""


def _leaves_blocks(prompt: NewRequest) -> bool:
    """Whether other choices of a prompt have something to wait for."""
    return bool(prompt.hashes) or prompt.sampling.num_prompt_logprobs is not None


def _claim_together(claims: Sequence[bytes]) -> bytes:
    """The name of a client's request at all routers: a list's is that of all of its prompts."""
    if len(claims) == 1 or not all(claims):
        return claims[0]
    return hashlib.blake2b(b"".join(claims), digest_size=len(claims[0])).digest()


def _claim_of(claim: bytes, index: int) -> bytes:
    """The name of a choice: prompts of one list may be equal, choices are not."""
    if not claim or not index:
        return claim
    return hashlib.blake2b(index.to_bytes(8, "little"), key=claim, digest_size=len(claim)).digest()


def _following(seed: int, nth: int) -> int:
    """The seed of a prompt's ``nth`` choice; 64 bits with a sign, as every seed."""
    return (seed + nth + SEEDS // 2) % SEEDS - SEEDS // 2
