"""Sampling parameters and log-probabilities on the wire."""

import math

from google.protobuf.message import Message

from disagg.messages.sampling import TOP_LOGPROBS_MAX, SamplingParams
from disagg.wire.checks import malformed, require_set
from disagg.wire.v1 import sampling_pb2


def put_sampling(wire: sampling_pb2.SamplingParams, sampling: SamplingParams) -> None:
    """Encode sampling parameters in an empty message; ``seed`` must fit int64."""
    wire.max_tokens = sampling.max_tokens
    wire.temperature = sampling.temperature
    wire.top_p = sampling.top_p
    wire.top_k = sampling.top_k
    wire.seed = sampling.seed
    wire.stop_token_ids.extend(sampling.stop_token_ids)
    wire.min_p = sampling.min_p
    wire.presence_penalty = sampling.presence_penalty
    wire.frequency_penalty = sampling.frequency_penalty
    wire.repetition_penalty = sampling.repetition_penalty
    wire.num_prompt_tokens = sampling.num_prompt_tokens
    wire.grammar = sampling.grammar
    wire.min_tokens = sampling.min_tokens
    if sampling.logit_bias:
        wire.logit_bias.update(sampling.logit_bias)
    if sampling.eos_token_ids:
        wire.eos_token_ids.extend(sampling.eos_token_ids)
    if sampling.num_logprobs is not None:
        wire.num_logprobs = sampling.num_logprobs
    if sampling.num_prompt_logprobs is not None:
        wire.num_prompt_logprobs = sampling.num_prompt_logprobs


def sampling_from_wire(parent: Message, field: str = "sampling") -> SamplingParams:
    """Decode the sampling parameters in a field of ``parent``."""
    require_set(parent, field)
    wire: sampling_pb2.SamplingParams = getattr(parent, field)
    _check(wire)
    return SamplingParams(
        max_tokens=wire.max_tokens,
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=wire.top_k,
        seed=wire.seed,
        stop_token_ids=tuple(wire.stop_token_ids),
        num_logprobs=wire.num_logprobs if wire.HasField("num_logprobs") else None,
        min_p=wire.min_p,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        repetition_penalty=wire.repetition_penalty if wire.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple(sorted(wire.logit_bias.items())),
        num_prompt_tokens=wire.num_prompt_tokens,
        grammar=wire.grammar,
        min_tokens=wire.min_tokens,
        eos_token_ids=tuple(wire.eos_token_ids),
        num_prompt_logprobs=(
            wire.num_prompt_logprobs if wire.HasField("num_prompt_logprobs") else None
        ),
    )


def _check(wire: sampling_pb2.SamplingParams) -> None:
    """Refuse numbers with which sampling has no meaning, or no end.

    Routers refuse more, and tell their clients by name; this is for what is no router.
    """
    for field, fits in (
        ("temperature", 0 <= wire.temperature < math.inf),
        ("top_p", 0 < wire.top_p <= 1),
        ("min_p", 0 <= wire.min_p <= 1),
        ("presence_penalty", math.isfinite(wire.presence_penalty)),
        ("frequency_penalty", math.isfinite(wire.frequency_penalty)),
        (
            "repetition_penalty",
            not wire.HasField("repetition_penalty") or 0 < wire.repetition_penalty < math.inf,
        ),
        ("logit_bias", all(math.isfinite(bias) for bias in wire.logit_bias.values())),
        ("num_logprobs", wire.num_logprobs <= TOP_LOGPROBS_MAX),
        ("num_prompt_logprobs", wire.num_prompt_logprobs <= TOP_LOGPROBS_MAX),
    ):
        if not fits:
            raise malformed(wire, field, f"is {getattr(wire, field)}")


def top_to_wire(top: tuple[tuple[int, float], ...]) -> sampling_pb2.TopLogprobs:
    """Encode (token id, logprob) pairs, best first."""
    return sampling_pb2.TopLogprobs(
        token_ids=[token_id for token_id, _ in top], logprobs=[logprob for _, logprob in top]
    )


def top_from_wire(wire: sampling_pb2.TopLogprobs) -> tuple[tuple[int, float], ...]:
    """Decode (token id, logprob) pairs."""
    if len(wire.token_ids) != len(wire.logprobs):
        what = f"has {len(wire.logprobs)} entries for {len(wire.token_ids)} tokens"
        raise malformed(wire, "logprobs", what)
    return tuple(zip(wire.token_ids, wire.logprobs, strict=True))
