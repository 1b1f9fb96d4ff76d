"""Traces as Mooncake publishes them: a JSON object per line."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TextIO

from disagg.errors import ConfigError
from disagg.simulation.prompts import TRACE_BLOCK, TraceRequest

REQUESTS_MAX = 5_000_000
HASH_IDS_MAX = 50_000_000
"""Of all requests together: each takes some 40 bytes, and a kernel that has no more memory ends the
process without a word."""
TOKENS_MAX = 1 << 24
"""Of a prompt or an answer: more is a mistake in the file."""
MS_MAX = 366 * 24 * 3_600_000
LINE_MAX = 1 << 24
"""Characters: many times what the longest prompt takes. What has no lines at all would fill the
memory before it is seen to be no trace."""


def lines_of(file: TextIO) -> Iterator[str]:
    """The lines of a file, of a longer one as much as `read_trace` needs to refuse it."""
    return iter(partial(file.readline, LINE_MAX + 1), "")


def read_trace(lines: Iterable[str], name: str = "trace") -> list[TraceRequest]:
    """Requests in order of arrival; empty lines and further fields are ignored.

    Args:
        lines: each with ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens) and
            ``hash_ids``, one for each `TRACE_BLOCK` tokens of the input.
        name: of the file, for messages.

    Raises:
        ConfigError: a line cannot be used; it names line and field.
    """
    found: list[TraceRequest] = []
    num_ids = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        if len(line) > LINE_MAX:
            raise ConfigError(f"{where}: more than {LINE_MAX:,} characters", param="trace")
        if len(found) >= REQUESTS_MAX:
            raise ConfigError(f"{where}: more than {REQUESTS_MAX:,} requests", param="trace")
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: no JSON: {error}", param="trace") from None
        if not isinstance(fields, dict):
            raise ConfigError(f"{where}: a JSON object is wanted", param="trace")
        found.append(_request(fields, where))
        num_ids += len(found[-1].hash_ids)
        if num_ids > HASH_IDS_MAX:
            raise ConfigError(
                f"{where}: hash_ids: more than {HASH_IDS_MAX:,} of all requests", param="trace"
            )
    if not found:
        raise ConfigError(f"{name}: no request", param="trace")
    return sorted(found, key=lambda one: one.at_ms)


def check_rate(requests: Sequence[TraceRequest], per_second: float) -> None:
    """Refuse a rate to which a trace cannot be stretched.

    Raises:
        ConfigError: its requests come all at one moment, or would come for too long.
    """
    if 1000 * len(requests) / per_second > MS_MAX:
        raise ConfigError(
            f"{per_second:g}/s: {len(requests):,} requests would come for more than "
            f"{MS_MAX // 86_400_000} days",
            param="rate",
        )
    if len(requests) > 1 and requests[0].at_ms == requests[-1].at_ms:
        raise ConfigError(
            "timestamp: all requests of the trace come at one moment, which no rate stretches",
            param="rate",
        )


def write_trace(requests: Iterable[TraceRequest]) -> Iterable[str]:
    """The lines of such a file."""
    for one in requests:
        fields = {
            "timestamp": round(one.at_ms),
            "input_length": one.num_prompt,
            "output_length": one.num_answer,
            "hash_ids": list(one.hash_ids),
        }
        yield json.dumps(fields) + "\n"


def _request(fields: Mapping[str, Any], where: str) -> TraceRequest:
    at_ms = fields.get("timestamp")
    if isinstance(at_ms, bool) or not isinstance(at_ms, int | float) or not 0 <= at_ms <= MS_MAX:
        raise ConfigError(
            f"{where}: timestamp: 0 to {MS_MAX:,} ms since the trace's begin are wanted, not "
            f"{at_ms!r}",
            param="trace",
        )
    num_prompt = _tokens(fields, "input_length", where)
    hash_ids = fields.get("hash_ids")
    if not isinstance(hash_ids, list) or any(
        isinstance(one, bool) or not isinstance(one, int) for one in hash_ids
    ):
        raise ConfigError(f"{where}: hash_ids: a list of integers is wanted", param="trace")
    if len(hash_ids) != (needed := -(-num_prompt // TRACE_BLOCK)):
        # With blocks of another size prompts would share more, or less, than they do.
        few_or_many = "few" if len(hash_ids) < needed else "many"
        raise ConfigError(
            f"{where}: hash_ids: {len(hash_ids)} ids of {TRACE_BLOCK} tokens are too {few_or_many} "
            f"for an input_length of {num_prompt}, which has {needed}",
            param="trace",
        )
    num_answer = _tokens(fields, "output_length", where)
    return TraceRequest(float(at_ms), num_prompt, num_answer, tuple(hash_ids))


def _tokens(fields: Mapping[str, Any], name: str, where: str) -> int:
    number = fields.get(name)
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= TOKENS_MAX:
        raise ConfigError(
            f"{where}: {name}: 1 to {TOKENS_MAX:,} tokens are wanted, not {number!r}",
            param="trace",
        )
    return number
