"""Step outputs on the wire: packed columns, since a submessage per token costs twice as much."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, repeat
from typing import TypeVar

from google.protobuf.message import Message

from disagg.messages.identity import RequestKey
from disagg.messages.outputs import FinishReason, PromptLogprobs, SequenceOutput, StepOutputs
from disagg.messages.sampling import TokenLogprobs
from disagg.wire.checks import malformed
from disagg.wire.identity_codec import key_from_wire, key_to_wire
from disagg.wire.v1 import outputs_pb2

_FINISH_REASONS = (FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH)
_FINISH_NUMBERS = {reason: number for number, reason in enumerate(_FINISH_REASONS)}

T = TypeVar("T")


def outputs_to_wire(step: StepOutputs) -> outputs_pb2.StepOutputs:
    """Encode a step's outputs; `ValueError` where logprobs are not parallel to tokens."""
    outputs = step.outputs
    scored = [entry for output in outputs for entry in output.logprobs]
    for output in outputs:
        if output.logprobs and len(output.logprobs) != len(output.token_ids):
            raise ValueError(f"{output.key}: logprobs are not parallel to token_ids")
    return outputs_pb2.StepOutputs(
        request_ids=[output.key.request_id for output in outputs],
        generations=[output.key.generation for output in outputs],
        positions=[output.position for output in outputs],
        num_tokens=[len(output.token_ids) for output in outputs],
        token_ids=[token_id for output in outputs for token_id in output.token_ids],
        finish_reasons=[_FINISH_NUMBERS[output.finish_reason] for output in outputs],
        has_logprobs=[bool(output.logprobs) for output in outputs],
        logprobs=[entry.logprob for entry in scored],
        num_top=[len(entry.top) for entry in scored],
        top_token_ids=[token_id for entry in scored for token_id, _ in entry.top],
        top_logprobs=[logprob for entry in scored for _, logprob in entry.top],
        prompt_logprobs=[
            prompt_logprobs_to_wire(one.position, one.logprobs, one.key)
            for one in step.prompt_logprobs
        ],
    )


def prompt_logprobs_to_wire(
    position: int, logprobs: Sequence[TokenLogprobs], key: RequestKey | None = None
) -> outputs_pb2.PromptLogprobs:
    """Encode log-probabilities of a prompt's tokens from a position on."""
    return outputs_pb2.PromptLogprobs(
        key=None if key is None else key_to_wire(key),
        position=position,
        logprobs=[entry.logprob for entry in logprobs],
        ranks=[entry.rank for entry in logprobs],
        num_top=[len(entry.top) for entry in logprobs],
        top_token_ids=[token_id for entry in logprobs for token_id, _ in entry.top],
        top_logprobs=[logprob for entry in logprobs for _, logprob in entry.top],
    )


def outputs_from_wire(wire: outputs_pb2.StepOutputs, router: str) -> StepOutputs:
    """Decode a step's outputs for a router.

    Raises:
        ProtocolError: columns whose lengths disagree, or an unknown finish reason.
    """
    request_ids = wire.request_ids[:]  # in half the time of `list`
    num_rows = len(request_ids)
    if not all(request_ids):
        raise malformed(wire, "request_ids", "has an empty entry")
    generations = _column(wire, "generations", wire.generations, num_rows)
    positions = _column(wire, "positions", wire.positions, num_rows)
    num_tokens = _column(wire, "num_tokens", wire.num_tokens, num_rows)
    finish_numbers = _column(wire, "finish_reasons", wire.finish_reasons, num_rows)
    has_logprobs = _column(wire, "has_logprobs", wire.has_logprobs, num_rows)
    token_ids = _column(wire, "token_ids", wire.token_ids, sum(num_tokens))
    if num_rows and max(finish_numbers) >= len(_FINISH_REASONS):
        raise malformed(wire, "finish_reasons", f"has an unknown number {max(finish_numbers)}")
    one_each = num_tokens.count(1) == num_rows
    tokens = zip(token_ids) if one_each else _rows(token_ids, num_tokens)
    scores: Iterable[tuple[TokenLogprobs, ...]] = repeat(())
    if True in has_logprobs:
        num_scored = [n if has else 0 for n, has in zip(num_tokens, has_logprobs, strict=True)]
        scores = _rows(_scores(wire, sum(num_scored)), num_scored)
    elif wire.logprobs or wire.num_top or wire.top_token_ids or wire.top_logprobs:
        raise malformed(wire, "has_logprobs", "has none, but log-probabilities are there")
    keys = map(RequestKey, request_ids, generations, repeat(router))
    reasons = map(_FINISH_REASONS.__getitem__, finish_numbers)
    outputs = tuple(map(SequenceOutput, keys, positions, tokens, scores, reasons))
    if not wire.prompt_logprobs:
        return StepOutputs(outputs)
    prompts = tuple(_prompt_from_wire(one, router) for one in wire.prompt_logprobs)
    return StepOutputs(outputs, prompts)


def _prompt_from_wire(wire: outputs_pb2.PromptLogprobs, router: str) -> PromptLogprobs:
    ranks = _column(wire, "ranks", wire.ranks, len(wire.logprobs))
    scores = _scores(wire, len(wire.logprobs), ranks)
    return PromptLogprobs(key_from_wire(wire, router=router), wire.position, scores)


def _rows(values: Sequence[T], lengths: Iterable[int]) -> Iterator[tuple[T, ...]]:
    """A column cut to its rows."""
    rest = iter(values)
    return (tuple(islice(rest, length)) if length else () for length in lengths)


def _scores(
    wire: outputs_pb2.StepOutputs | outputs_pb2.PromptLogprobs, num: int, ranks: Sequence[int] = ()
) -> tuple[TokenLogprobs, ...]:
    logprobs = _column(wire, "logprobs", wire.logprobs, num)
    num_top = _column(wire, "num_top", wire.num_top, num)
    top_ids = _column(wire, "top_token_ids", wire.top_token_ids, sum(num_top))
    top_logprobs = _column(wire, "top_logprobs", wire.top_logprobs, sum(num_top))
    pairs = tuple(zip(top_ids, top_logprobs, strict=True))
    scores = []
    first = 0
    for logprob, count, rank in zip(logprobs, num_top, ranks or [0] * num, strict=True):
        scores.append(TokenLogprobs(logprob, pairs[first : first + count], rank))
        first += count
    return tuple(scores)


def _column(wire: Message, name: str, column: Sequence[T], num: int) -> Sequence[T]:
    values = column[:]
    if len(values) != num:
        raise malformed(wire, name, f"has {len(values)} entries, not {num}")
    return values
