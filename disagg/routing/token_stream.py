"""The tokens of one request, put in order: no gap, no duplicate, no contradiction."""

from collections.abc import Sequence

from disagg.errors import ProtocolError
from disagg.messages.outputs import FinishReason, PromptLogprobs, SequenceOutput
from disagg.messages.sampling import TokenLogprobs
from disagg.routing.actions import Deliver
from disagg.routing.prompt_scores import PromptScores

_Sampled = tuple[int, TokenLogprobs | None]


class TokenStream:
    """Prompt and accepted tokens by absolute position, and those that came too early.

    Token 0 of a generation may come from the prefill worker and from the decode worker, whose
    streams are not ordered among each other; whatever overlaps must be equal. No token is accepted
    before all that is wanted of the prompt is there: it may come from a worker that is then lost.

    Args:
        request_id: of the request whose they are.
        prompt: its tokens.
        max_tokens: of the answer.
        with_logprobs: each token has to come with its log-probabilities.
        num_prompt_logprobs: as in `PromptScores`.

    Attributes:
        tokens: prompt and accepted tokens; only appended to.
        num_prompt_tokens: of the client's prompt.
        end: position that is never exceeded.
        room_tokens: that a worker needs room for: up to the end, and one more than the prompt, also
            of a request that wants no token.
        scores: log-probabilities of the prompt.
    """

    def __init__(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        max_tokens: int,
        with_logprobs: bool,
        num_prompt_logprobs: int | None = None,
    ) -> None:
        self.tokens: Sequence[int] = prompt  # copied with the first token: a plan need not wait
        self.num_prompt_tokens = len(prompt)
        self.end = len(prompt) + max_tokens
        self.room_tokens = max(self.end, len(prompt) + 1)
        self._request_id = request_id
        self._with_logprobs = with_logprobs
        self._ahead: dict[int, _Sampled] = {}
        self._finish: tuple[int, FinishReason] | None = None
        self.scores = PromptScores(len(prompt), num_prompt_logprobs)

    @property
    def has_begun(self) -> bool:
        """Whether any token was accepted."""
        return len(self.tokens) > self.num_prompt_tokens

    @property
    def num_ahead(self) -> int:
        """Tokens that wait for one before them; bounded by the caller."""
        return len(self._ahead)

    def restart(self) -> None:
        """A new generation goes on after the accepted tokens; early ones will come again."""
        self._ahead.clear()
        self._finish = None
        self.scores.restart()

    def score(self, message: PromptLogprobs) -> Deliver | None:
        """Take what a worker says of the prompt; as `accept`, for tokens that waited for it.

        Raises:
            ProtocolError: it does not go on where the worker stopped, or was not requested.
        """
        self.scores.accept(message.position, message.logprobs)
        return self._advance() if self._ahead or self._finish else None

    def accept(self, output: SequenceOutput) -> Deliver | None:
        """Take tokens of the current generation; None when nothing became deliverable.

        Raises:
            ProtocolError: they contradict what is known; nothing of ``output`` is delivered.
        """
        position, tokens = output.position, output.token_ids
        num = len(tokens)
        if (
            position == len(self.tokens)
            and 0 < num <= self.end - position
            and not self._ahead
            and not self._finish
            and self.scores.taken
            and len(output.logprobs) == (num if self._with_logprobs else 0)
            and min(tokens) >= 0
        ):  # the usual case, a step's token in its turn: nothing to check against or to sort
            accepted, reason = self.tokens, output.finish_reason
            if not isinstance(accepted, list):
                accepted = self._accepted()
            accepted.extend(tokens)
            if reason:
                self._finish = position + num, reason
            elif position + num == self.end:
                reason = FinishReason.LENGTH
            return Deliver(self._request_id, tokens, output.logprobs, reason)
        self._check(output)
        for position, token in enumerate(tokens, output.position):
            if len(self.tokens) <= position < self.end:
                logprobs = output.logprobs[position - output.position] if output.logprobs else None
                self._ahead.setdefault(position, (token, logprobs))
        if output.finish_reason is not FinishReason.NONE:
            self._set_finish(output)
        return self._advance()

    def _advance(self) -> Deliver | None:
        """Accept the tokens that no other one, and nothing of the prompt, is lacking before."""
        if not self.scores.complete:
            return None
        first = len(self.tokens)
        stop = self.end if self._finish is None else self._finish[0]
        logprobs_out: list[TokenLogprobs] = []
        while len(self.tokens) < stop and len(self.tokens) in self._ahead:
            token, logprobs = self._ahead.pop(len(self.tokens))
            self._accepted().append(token)
            if logprobs is not None:
                logprobs_out.append(logprobs)
        reason = FinishReason.NONE
        if self._finish is not None and len(self.tokens) == self._finish[0]:
            reason = self._finish[1]
        elif len(self.tokens) == self.end:
            reason = FinishReason.LENGTH
        if len(self.tokens) == first and reason is FinishReason.NONE:
            return None
        scores = self.scores.take()
        new = tuple(self.tokens[first:])
        return Deliver(self._request_id, new, tuple(logprobs_out), reason, scores)

    def _accepted(self) -> list[int]:
        """The tokens, to append to."""
        if not isinstance(self.tokens, list):
            self.tokens = list(self.tokens)
        return self.tokens

    def _check(self, output: SequenceOutput) -> None:
        if self._with_logprobs and len(output.logprobs) != len(output.token_ids):
            raise ProtocolError(
                f"{len(output.logprobs)} logprobs came with {len(output.token_ids)} tokens"
            )
        if not self._with_logprobs and output.logprobs:
            raise ProtocolError("logprobs came that were not requested")
        if output.position < 0:
            raise ProtocolError(f"tokens came for position {output.position}")
        for position, token in enumerate(output.token_ids, output.position):
            if token < 0:
                raise ProtocolError(f"a negative token id came for position {position}")
            known = (
                self.tokens[position]
                if position < len(self.tokens)
                else self._ahead.get(position, (token, None))[0]
            )
            if known != token:
                raise ProtocolError(f"two different tokens came for position {position}")

    def _set_finish(self, output: SequenceOutput) -> None:
        at = output.position + len(output.token_ids)
        reason = output.finish_reason
        if at > self.end:
            at, reason = self.end, FinishReason.LENGTH
        if at < len(self.tokens) or self._finish not in (None, (at, reason)):
            raise ProtocolError(f"the request ended twice, now at position {at} with {reason}")
        self._finish = at, reason
