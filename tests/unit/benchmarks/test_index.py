"""What both sides of the prefix index's benchmark are told."""

import pytest

from benchmarks.index.turns import by_turns
from benchmarks.index.workload import SHAPES, Block, churn, holdings, one_block_events


@pytest.mark.parametrize("shape", SHAPES)
def test_workers_hold_what_the_shape_says(shape: str) -> None:
    events = list(holdings(shape, 10, 64))
    whole = {event.worker for event in events if len(event.blocks) == 2048 and not event.parent}
    of_prompt = {event.worker for event in events if event.blocks[0].prompt == 0}
    assert len(of_prompt) == (1 if shape == "distinct" else 10)
    assert (len(whole & of_prompt) == 10) == (shape == "shared")
    assert list(holdings(shape, 10, 64)) == events, "the same for both sides"


def test_an_event_names_the_block_before_it() -> None:
    grown = {worker: [] for worker in range(3)}  # type: dict[int, list[Block]]
    for event in one_block_events(3, 8):
        assert event.parent == (grown[event.worker][-1] if grown[event.worker] else None)
        grown[event.worker] += event.blocks
    assert all(len(blocks) == 8 for blocks in grown.values())


def test_what_goes_was_there() -> None:
    held: dict[int, set[Block]] = {0: set(), 1: set()}
    num_gone = 0
    for event in churn(2, 500, 20):
        if event.removed:
            assert held[event.worker] >= set(event.blocks)
            held[event.worker] -= set(event.blocks)
            num_gone += len(event.blocks)
        else:
            held[event.worker] |= set(event.blocks)
    assert num_gone > 1000


def test_our_side_finds_what_workers_hold() -> None:
    order = {"shape": "shared", "workers": 3, "block_tokens": 64, "samples": 1}
    cases = [("ours", order | {"groups": groups}) for groups in ("full", "full + window 1024")]
    for answer, num_groups in zip(by_turns(cases), (1, 2), strict=True):
        assert (answer["found_blocks"], answer["num_found"]) == (3 * 2048, 3)
        assert answer["num_held"] == num_groups * 3 * 2048
