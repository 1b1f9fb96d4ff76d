"""From tokens to text: whole characters, stop strings."""

from dataclasses import field
from itertools import islice

from disagg.messages.frozen import dataclass
from disagg.messages.outputs import FinishReason
from disagg.messages.sampling import TokenLogprobs
from disagg.router.client_stream import STOP_STRING, ClientStream
from disagg.router.tokenizer import Tokenizer
from disagg.routing.actions import Deliver, NewRequest


@dataclass(frozen=True, slots=True)
class Piece:
    """Something new for the client; the last one has a finish reason. Nobody changes one."""

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


class TextReader:
    """The text of one stream of tokens, delta by delta.

    A token that ends the request by being a stop token is counted but not shown. Tokens are
    reported when they arrive, their text when it can no longer be part of a stop string. Within the
    first ``min_tokens`` no stop string ends. See ``Tokenizer.detokenizer`` for ``with_marks``
    and ``skip_special_tokens``.

    Args:
        request: whose answer it is.
        tokenizer: decodes it.
        stop: strings that end it.

    Attributes:
        may_stop: a stop string may end it.
        stopped: one has, before the tokens did.
    """

    def __init__(
        self,
        request: NewRequest,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        *,
        with_marks: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = tokenizer.detokenizer(
            request.token_ids, with_marks=with_marks, skip_special_tokens=skip_special_tokens
        )
        self._matcher = StopMatcher(stop)
        self._min_tokens = request.sampling.min_tokens
        self._stop_ids = request.sampling.stop_token_ids
        self._num_tokens = 0
        self.may_stop = bool(stop)
        self.stopped = False

    def piece(self, delta: Deliver) -> Piece:
        """What a delta adds; nothing may be read after a piece with a finish reason."""
        tokens, push = delta.token_ids, self._detokenizer.push
        if not (self.may_stop or delta.finish_reason):  # the usual case
            text = push(tokens[0]) if len(tokens) == 1 else "".join(map(push, tokens))
            self._num_tokens += len(tokens)
            return Piece(text, tokens, delta.logprobs, "", delta.prompt_logprobs)
        return self._matched(delta)

    def _matched(self, delta: Deliver) -> Piece:
        finish, tokens = delta.finish_reason.value, delta.token_ids
        is_stop = delta.finish_reason is FinishReason.STOP
        last_is_shown = not (is_stop and tokens and tokens[-1] in self._stop_ids)
        text, used = "", len(tokens)
        for index, token_id in enumerate(islice(tokens, used - (not last_is_shown))):
            self._num_tokens += 1
            may_end = self._num_tokens > self._min_tokens
            new, found = self._matcher.push(self._detokenizer.push(token_id), may_end=may_end)
            text += new
            if found:
                self.stopped = True
                finish, used = FinishReason.STOP.value, index + 1
                break
        else:
            if finish:
                may_end = self._num_tokens > self._min_tokens
                new, found = self._matcher.push(self._detokenizer.finish(), may_end=may_end)
                text += new + self._matcher.flush()
                if found:
                    finish = FinishReason.STOP.value
        return Piece(text, tokens[:used], delta.logprobs[:used], finish, delta.prompt_logprobs)


async def next_piece(stream: ClientStream, reader: TextReader) -> Piece:
    """Wait for tokens and decode them; a stop string cancels the rest at the workers.

    Raises:
        DisaggError: the request failed.
    """
    piece = reader.piece(await stream.next())
    if reader.stopped:
        stream.cancel(STOP_STRING)
    return piece
