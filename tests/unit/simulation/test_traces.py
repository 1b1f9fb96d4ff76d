"""Traces: read, made, stretched; what is equal in them is equal in tokens."""

import io
import json
from typing import Any

import pytest

from disagg.errors import ConfigError
from disagg.simulation import trace_file
from disagg.simulation.mixes import MIXES, Lengths, check_mix, make_trace
from disagg.simulation.prompts import TRACE_BLOCK, Prompts, TraceRequest, at_rate, own_rate
from disagg.simulation.trace_file import LINE_MAX, check_rate, lines_of, read_trace, write_trace

GOOD = {"timestamp": 7, "input_length": 600, "output_length": 3, "hash_ids": [4, 9]}
LENGTHS = Lengths(8_192, 0.2)


def line(**changes: Any) -> str:
    fields = {**GOOD, **changes}
    return json.dumps({name: value for name, value in fields.items() if value is not ...})


def test_a_line_of_mooncake() -> None:
    # The first of its documentation, with a further field.
    text = (
        '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "extra": 1, "hash_ids": '
        "[46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 2353, 2354]}"
    )
    (one,) = read_trace(["", text, "\n"])
    assert (one.at_ms, one.num_prompt, one.num_answer) == (27482, 6955, 52)
    assert len(one.hash_ids) == 14


def test_requests_are_in_order_of_arrival() -> None:
    assert [one.at_ms for one in read_trace([line(timestamp=9), line(timestamp=2)])] == [2, 9]


def test_what_is_written_is_read_again() -> None:
    made = make_trace("multi-turn", 5, 10, LENGTHS, 1)
    read = read_trace(write_trace(made))
    assert [one.hash_ids for one in read] == [one.hash_ids for one in made]
    assert [one.num_prompt for one in read] == [one.num_prompt for one in made]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"timestamp": -1}, "timestamp"),
        ({"timestamp": "now"}, "timestamp"),
        ({"timestamp": ...}, "timestamp"),
        ({"input_length": 0}, "input_length"),
        ({"input_length": 1.5}, "input_length"),
        ({"output_length": True}, "output_length"),
        ({"output_length": 1 << 30}, "output_length"),
        ({"hash_ids": "4"}, "hash_ids"),
        ({"hash_ids": [4, "9"]}, "hash_ids"),
        ({"hash_ids": [4]}, "hash_ids"),
        ({"hash_ids": list(range(38))}, "hash_ids"),
        ({"hash_ids": ...}, "hash_ids"),
    ],
)
def test_a_bad_line_names_line_and_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^t\.jsonl, line 3: {field}: "):
        read_trace([line(), "", line(**changes)], "t.jsonl")


def test_a_time_of_day_is_none_of_a_trace() -> None:
    with pytest.raises(ConfigError, match="timestamp: 0 to 31,622,400,000 ms since the trace"):
        read_trace([line(timestamp=1_700_000_000_000)])


@pytest.mark.parametrize(
    ("text", "why"), [("{", "no JSON"), ("[" * 100_000, "no JSON"), ("[1]", "a JSON object")]
)
def test_a_line_that_is_no_object(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"line 1: {why}"):
        read_trace([text])


def test_what_has_no_lines_is_refused_before_it_is_read_whole() -> None:
    class Endless(io.TextIOBase):
        def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
            assert 0 < size <= LINE_MAX + 1
            return "0" * size

    with pytest.raises(ConfigError, match="line 1: more than 16,777,216 characters"):
        read_trace(lines_of(Endless()))  # type: ignore[arg-type]
    assert len(read_trace(lines_of(io.StringIO(line() + "\n\n" + line())))) == 2


def test_what_would_fill_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "HASH_IDS_MAX", 4)
    assert len(read_trace([line()] * 2)) == 2
    with pytest.raises(ConfigError, match="line 3: hash_ids: more than 4 of all requests"):
        read_trace([line()] * 3)


def test_an_empty_trace() -> None:
    with pytest.raises(ConfigError, match="no request"):
        read_trace(["\n"])


def test_equal_ids_are_equal_tokens_and_no_others() -> None:
    prompts = Prompts()
    one = prompts.tokens(TraceRequest(0, 1_000, 1, (5, 6)))
    longer = prompts.tokens(TraceRequest(0, 1_030, 1, (5, 6, 9)))
    other = prompts.tokens(TraceRequest(0, 1_000, 1, (5, 7)))
    assert len(one) == 1_000
    assert longer[:1_000] == one
    assert other[:TRACE_BLOCK] == one[:TRACE_BLOCK]
    assert not set(other[TRACE_BLOCK:]) & set(one)


def test_a_stretched_trace_has_its_rate() -> None:
    trace = [TraceRequest(1_000 + 10 * n, 1, 1, (0,)) for n in range(100)]
    slow = at_rate(trace, 4)
    assert slow[0].at_ms == 0
    assert slow[-1].at_ms == pytest.approx(99 / 4 * 1_000)
    assert at_rate(trace[:1], 2)[0].at_ms == 0


@pytest.mark.parametrize("begin_ms", [0, 600_000])
def test_a_trace_at_its_own_rate_keeps_its_gaps(begin_ms: int) -> None:
    """Also where it is a slice from the middle of another one."""
    at_ms = [0, 10, 500, 4_000]
    trace = [TraceRequest(begin_ms + one, 1, 1, (0,)) for one in at_ms]
    assert [one.at_ms for one in at_rate(trace, own_rate(trace))] == pytest.approx(at_ms)
    stretched = at_rate(trace, own_rate(trace) / 2)
    assert [one.at_ms for one in stretched] == pytest.approx([2 * one for one in at_ms]), "control"
    at_once = trace[:1] * 3
    assert [one.at_ms for one in at_rate(at_once, own_rate(at_once))] == [0, 0, 0]


@pytest.mark.parametrize("mix", sorted(MIXES))
def test_a_mix_by_its_rate_and_seed(mix: str) -> None:
    made = make_trace(mix, 20, 60, LENGTHS, 0)
    assert made == make_trace(mix, 20, 60, LENGTHS, 0)
    assert made != make_trace(mix, 20, 60, LENGTHS, 1)
    assert 0.6 * 1_200 < len(made) < 1.4 * 1_200
    assert [one.at_ms for one in made] == sorted(one.at_ms for one in made)
    assert all(0 <= one.at_ms < 60_000 for one in made)
    for one in made:
        assert one.num_prompt + one.num_answer < LENGTHS.tokens_max
        assert len(one.hash_ids) == -(-one.num_prompt // TRACE_BLOCK)


@pytest.mark.parametrize("mix", ["multi-turn", "shifting"])
def test_conversations_come_at_the_rate_that_is_asked(mix: str) -> None:
    """In the mean of some traces, as one has 300 conversations of 1 to 40 turns."""
    num = sum(len(make_trace(mix, 20, 60, LENGTHS, seed)) for seed in range(40))
    assert num == pytest.approx(40 * 20 * 60, rel=0.03)


def shared_share(mix: str) -> float:
    """Of the blocks of prompts those that an earlier one had."""
    seen: set[int] = set()
    num = shared = 0
    for one in make_trace(mix, 20, 60, Lengths(32_768), 0):
        shared += sum(block in seen for block in one.hash_ids)
        num += len(one.hash_ids)
        seen.update(one.hash_ids)
    return shared / num


def test_mixes_differ_in_what_they_share() -> None:
    assert shared_share("long-documents") == 0
    assert shared_share("shared-code") > 0.6
    assert 0.2 < shared_share("multi-turn") < 0.9


@pytest.mark.parametrize("mix", ["multi-turn", "shifting"])
def test_conversations_from_before_count_too(mix: str) -> None:
    with pytest.raises(ConfigError, match="more than 2,000,000 requests"):
        check_mix(mix, 100_000, 0.1, LENGTHS, 0)
    check_mix("short-chat", 100_000, 0.1, LENGTHS, 0)


def test_a_mix_for_the_smallest_model() -> None:
    assert min(one.num_prompt for one in make_trace("shifting", 4, 20, Lengths(3), 0)) == 1
    with pytest.raises(ConfigError, match=r"scheduling\.max_model_tokens: 3 at least"):
        make_trace("shifting", 4, 20, Lengths(2), 0)


def test_rates_that_a_trace_cannot_have() -> None:
    trace = [TraceRequest(at_ms, 1, 1, (0,)) for at_ms in (5, 5, 6)]
    check_rate(trace, 1e-7)
    with pytest.raises(ConfigError, match=r"^9e-08/s: 3 requests .* more than 366 days"):
        check_rate(trace, 9e-8)
    check_rate(trace[:1], 1)
    with pytest.raises(ConfigError, match="timestamp: all requests"):
        check_rate(trace[:2], 1)


def test_bad_mixes() -> None:
    with pytest.raises(ConfigError, match="short-chat"):
        make_trace("chat", 1, 1, LENGTHS, 0)
    with pytest.raises(ConfigError, match="no request"):
        make_trace("short-chat", 1e-6, 1, LENGTHS, 0)
    with pytest.raises(ConfigError, match="more than"):
        make_trace("short-chat", 1e6, 1e6, LENGTHS, 0)
