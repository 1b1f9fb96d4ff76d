"""The benchmark of what the prefix cache keeps: its workloads, its server, its sums."""

import json
from pathlib import Path

import pytest

from benchmarks.retention.__main__ import DEFAULT, POLICIES, num_blocks_of, play, summary
from benchmarks.retention.replay import replay
from benchmarks.retention.workloads import (
    TRACE_BLOCK,
    Request,
    mooncake_rows,
    read_trace,
    requests_of,
    workload,
)


class Remembers:
    """Finds what it has seen before, block by block of 16; has room for ``room`` at once."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._known: set[tuple[int, ...]] = set()
        self._live: dict[int, int] = {}
        self.refused = 0

    def begin(self, number: int, request: Request) -> int | None:
        if len(self._live) == self._room:
            return None
        tokens = tuple(request.prompt)
        ends = range(16, len(tokens), 16)
        hit = max((end for end in ends if tokens[:end] in self._known), default=0)
        self._known |= {tokens[:end] for end in range(16, len(tokens) + 1, 16)}
        self._live[number] = hit
        return hit

    def compute(self, number: int, num_new: int) -> bool:
        self._live[number] += num_new
        return True

    def answer(self, number: int, num_new: int) -> bool:
        self.refused += number == 1 and len(self._live) > 1 and self.refused < 2
        return not (number == 1 and len(self._live) > 1 and self.refused < 2)

    def end(self, number: int) -> None:
        del self._live[number]


def prompt(shared: int, own: int, name: int) -> Request:
    return Request([*range(shared), *range(1000 * name, 1000 * name + own)], 40)


def test_the_server_computes_what_was_not_found_and_again_what_was_preempted() -> None:
    requests = [prompt(64, 36, name) for name in (1, 2, 3)]
    played = replay(Remembers(8), requests)
    assert played.prompt_tokens == 300
    assert played.hit_tokens == 128
    assert played.preemptions == 1
    assert played.computed_tokens == 100 + 2 * 36 + 4  # the third one again, from its last block


def test_a_request_for_an_empty_cache_that_has_no_room_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        replay(Remembers(0), [prompt(64, 36, 1)])


def test_a_trace_repeats_what_a_conversation_began_with(tmp_path: Path) -> None:
    rows = mooncake_rows(40, seed=3)
    assert rows == mooncake_rows(40, seed=3) != mooncake_rows(40, seed=4)
    assert all(-(-row.input_length // TRACE_BLOCK) == len(row.hash_ids) for row in rows)
    assert [row.timestamp for row in rows] == sorted(row.timestamp for row in rows)
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(vars(row) | {"extra": 1}) for row in rows))
    assert read_trace(path) == rows
    requests = requests_of(rows)
    assert workload(str(path), 40, 0) == requests == workload("mooncake", 40, 3)
    assert [len(one.prompt) for one in requests] == [row.input_length for row in rows]
    first_blocks = [tuple(one.prompt[:TRACE_BLOCK]) for one in requests]
    assert len(set(first_blocks)) < len(first_blocks)


@pytest.mark.parametrize("name", ["shared", "mooncake"])
def test_every_policy_serves_every_request_in_the_smallest_pool(name: str) -> None:
    requests = workload(name, 10, 2)
    rates = {}
    for label, policy in POLICIES.items():
        played = play(requests, num_blocks_of(requests, 12), policy)
        assert played.computed_tokens >= played.prompt_tokens - played.hit_tokens
        rates[label] = [played.hit_rate]
    roomy = play(requests, num_blocks_of(requests, 0.5), POLICIES[DEFAULT])
    assert roomy.preemptions == 0
    assert 0 < roomy.hit_rate < 1
    lines = summary({(name, 1): rates, (name, 2): {label: [0.0] for label in rates}})
    (default,) = (x for x in lines if x["workload"] == "all" and x["policy"] == DEFAULT)
    assert default["mean"] == pytest.approx(rates[DEFAULT][0] / 2, abs=1e-4)
    assert default["over the default"] == [0, 0]
