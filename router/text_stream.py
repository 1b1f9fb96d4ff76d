"""From tokens to text: whole characters, stop strings."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from disagg.messages.outputs import FinishReason
from disagg.messages.sampling import TokenLogprobs
from disagg.router.client_stream import STOP_STRING, ClientStream
from disagg.router.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """Something new for the client; the last one has a finish reason."""

    text: str = field(repr=False)
    token_ids: tuple[int, ...] = field(repr=False)
    logprobs: tuple[TokenLogprobs, ...] = field(repr=False)
    finish_reason: str
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = field(default=(), repr=False)
    """With the first piece, if requested: of each token of the prompt; its first one has none."""


class StopMatcher:
    """Cuts text before the stop string that ends first, however it falls between pieces.

    Of those that end together the longest counts. (Which string *begins* first would depend on the
    pieces: a longer one may not be there yet.)
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, bool]:
        """Return the text that is safe to show and whether a stop string was found.

        One that ends within this text counts, unless the text may not end yet.
        """
        if not self._stop:
            return text, False
        num_held, text = len(self._held), self._held + text
        found = [
            (at + len(stop), at)
            for stop in self._stop
            if may_end and (at := text.find(stop, max(0, num_held - len(stop) + 1))) >= 0
        ]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        self._held = ""
        for size in range(min(len(text), max(map(len, self._stop)) - 1), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stop):
                self._held = text[-size:]
                return text[:-size], False
        return text, False

    def flush(self) -> str:
        """Return what was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


async def pieces(
    stream: ClientStream,
    tokenizer: Tokenizer,
    stop: tuple[str, ...],
    *,
    with_marks: bool = False,
    skip_special_tokens: bool = True,
) -> AsyncGenerator[Piece, None]:
    """Decode a token stream; a stop string ends it and cancels the rest at the workers.

    A token that ends the request by being a stop token is counted but not shown. Tokens are
    reported when they arrive, their text when it can no longer be part of a stop string. Within the
    first ``min_tokens`` no stop string ends. See ``Tokenizer.detokenizer`` for ``with_marks``
    and ``skip_special_tokens``.

    Raises:
        DisaggError: the request failed.
    """
    detokenizer = tokenizer.detokenizer(
        stream.request.token_ids, with_marks=with_marks, skip_special_tokens=skip_special_tokens
    )
    matcher = StopMatcher(stop)
    sampling = stream.request.sampling
    stop_ids = sampling.stop_token_ids
    finish, num_tokens = "", 0
    while not finish:
        delta = await stream.next()
        finish = delta.finish_reason.value
        last_is_shown = delta.finish_reason is not FinishReason.STOP or (
            bool(delta.token_ids) and delta.token_ids[-1] not in stop_ids
        )
        shown = len(delta.token_ids) if last_is_shown else len(delta.token_ids) - 1
        text, used = "", len(delta.token_ids)
        for index in range(shown):
            num_tokens += 1
            may_end = num_tokens > sampling.min_tokens
            new, stopped = matcher.push(detokenizer.push(delta.token_ids[index]), may_end=may_end)
            text += new
            if stopped:
                finish, used = FinishReason.STOP.value, index + 1
                stream.cancel(STOP_STRING)
                break
        else:
            if finish:
                may_end = num_tokens > sampling.min_tokens
                new, stopped = matcher.push(detokenizer.finish(), may_end=may_end)
                text += new + matcher.flush()
                if stopped:
                    finish = FinishReason.STOP.value
        yield Piece(
            text, delta.token_ids[:used], delta.logprobs[:used], finish, delta.prompt_logprobs
        )
