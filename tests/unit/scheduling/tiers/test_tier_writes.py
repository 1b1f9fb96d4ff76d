"""What is written to a tier, when, and how much at once."""

import pytest

from disagg.messages.session import Cancel
from disagg.scheduling.actions import ReadTier, WriteTier
from disagg.scheduling.tiers.writes import RETRY_MS
from disagg.testing.simulation.symbolic_engine import expected_tokens
from tests.unit.scheduling.failure_worlds import LAYOUTS
from tests.unit.scheduling.tiers.tiered_worker import SLOW_MS, TieredWorker, tier

FULL = LAYOUTS["full"]
"""Blocks of 4 tokens."""


def prompt(number: int, num_tokens: int) -> tuple[int, ...]:
    return tuple((13 * i + 101 * number) % 997 for i in range(num_tokens))


def num_written(worker: TieredWorker) -> int:
    return worker.counts.get("tier_blocks_written_host", 0)


def test_on_publish_chunks_are_written_while_the_prompt_is_computed() -> None:
    worker = TieredWorker(FULL, 40, tier(), at_once=False)
    worker.submit(prompt(1, 40))
    for num_chunks in (1, 2):
        step = worker.step()
        assert step is not None
        worker.end(step)
        assert sum(len(copy.blocks) for copy in worker.copies) == 4 * num_chunks
    held = {block for copy in worker.copies for _, block in copy.blocks}
    worker.run()
    assert not worker.core.sequences
    assert {b for name, some in worker.kv.pool.holders().items() for b in some} >= held
    assert worker.kv.num_free_blocks == worker.kv.num_usable_blocks - 10
    while worker.copies:
        worker.copy(worker.copies[0])
    assert worker.kv.num_free_blocks == worker.kv.num_usable_blocks
    assert num_written(worker) == len(worker.stores["host"]) == 10


def test_before_an_eviction_is_written_what_would_be_evicted_next() -> None:
    worker = TieredWorker(FULL, 41, tier(write="eviction"), max_step_tokens=8)
    worker.ask(prompt(1, 80))
    assert not num_written(worker), "half of the pool was never used"
    worker.ask(prompt(2, 60))
    first = set(worker.stores["host"])
    assert 0 < num_written(worker) < 35
    worker.ask(prompt(3, 80))
    assert first < set(worker.stores["host"])
    found = worker.kv.pool.next_evicted(worker.kv.num_free_blocks)
    contents = [worker.kv.pool.cache.content(block) for block in found]
    # What was written is still the next to go, in one run.
    clean = [content in worker.stores["host"] for content in contents]
    assert clean == sorted(clean, reverse=True)
    assert any(clean)
    before = worker.counts["tier_blocks_written_host"]
    for _ in range(20):
        worker.tick()
    assert worker.counts["tier_blocks_written_host"] == before, "once is enough"


def test_what_a_small_tier_gives_up_is_not_written_for_ever() -> None:
    worker = TieredWorker(FULL, 41, tier(write="eviction", blocks_max=6), max_step_tokens=8)
    for number in range(4):
        worker.ask(prompt(number, 80))
    written = num_written(worker)
    for _ in range(20):
        worker.tick()
    assert num_written(worker) == written


def test_a_prompt_seen_once_is_never_written() -> None:
    worker = TieredWorker(FULL, 60, tier(write="reuse"))
    for number in range(4):
        worker.ask(prompt(number, 40), 3)
    assert not num_written(worker)
    worker.ask((*prompt(2, 24), 1, 2, 3), 3)
    assert num_written(worker) == 24 // 4
    worker.ask(prompt(2, 24), 3)
    assert num_written(worker) == 24 // 4


def test_an_answer_is_written_when_the_next_turn_has_it() -> None:
    worker = TieredWorker(FULL, 60, tier(write="reuse"))
    first = prompt(1, 20)
    answer = worker.ask(first, 9)
    assert not num_written(worker)
    worker.ask((*first, *answer, 5), 1)
    assert num_written(worker) == 28 // 4


def test_a_prompt_that_comes_again_after_its_eviction_is_written() -> None:
    worker = TieredWorker(FULL, 22, tier(write="reuse"))
    for number in (1, 2):
        worker.ask(prompt(number, 80))
    assert not num_written(worker)
    worker.ask(prompt(1, 80))
    assert num_written(worker) == 20


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_more_is_held_at_once_than_allowed(layout: str) -> None:
    worker = TieredWorker(
        LAYOUTS[layout], 200, tier(), at_once=False, write_share_max=0.05, blocks_per_copy_max=3
    )
    worker.submit(prompt(1, 60))
    worker.run()
    most = 0
    while worker.copies:
        most = max(most, sum(len(copy.blocks) for copy in worker.copies))
        assert len(worker.copies) <= worker.core.limits.tier_copies_max
        worker.copy(worker.copies[0])
    assert 3 < most <= max(9, 4)
    cached = {
        (group, value)
        for group in range(len(worker.kv.managers))
        for value in worker.kv.pool.cache.index(group)
    }
    assert cached <= worker.stores["host"].keys(), "all of it in the end"


def test_what_is_evicted_before_its_turn_is_not_written() -> None:
    worker = TieredWorker(FULL, 22, tier(), at_once=False, write_share_max=0.1)
    worker.submit(prompt(1, 80))
    worker.run()
    (copy,) = worker.copies
    assert len(copy.blocks) == 2
    worker.submit(prompt(2, 60))
    worker.run()
    while worker.copies:
        worker.copy(worker.copies[0])
    assert worker.kv.num_free_blocks == worker.kv.num_usable_blocks
    assert 2 < len(worker.stores["host"]) < 35


def test_a_tier_that_takes_nothing_is_left_alone_for_a_while() -> None:
    worker = TieredWorker(FULL, 60, tier())
    worker.takes = lambda key: False
    worker.ask(prompt(1, 40))
    assert worker.counts["tier_blocks_refused_host"] == 4, "the first chunk"
    worker.takes = lambda key: True
    worker.tick(RETRY_MS - 1)
    assert not num_written(worker)
    worker.tick(1)
    assert num_written(worker) == 6


def test_each_tier_has_a_policy_of_its_own() -> None:
    worker = TieredWorker(FULL, 60, tier(), tier("disk", "reuse"))
    worker.ask(prompt(1, 40))
    assert len(worker.stores["host"]) == 10
    assert not worker.stores["disk"]
    worker.ask(prompt(1, 40))
    assert len(worker.stores["disk"]) == 10


def test_a_tier_that_stands_still_leaves_others_their_share() -> None:
    worker = TieredWorker(
        FULL,
        60,
        tier("stuck"),
        tier("disk"),
        at_once=False,
        write_share_max=0.2,
        blocks_per_copy_max=12,
        max_step_tokens=64,
    )

    def copy_to_disk() -> None:
        while found := [copy for copy in worker.copies if copy.tier == "disk"]:
            worker.copy(found[0])

    for number in range(3):
        worker.submit(prompt(number, 48))
        worker.run()
        copy_to_disk()
        worker.tick(SLOW_MS + 1)
        copy_to_disk()
    assert {copy.tier for copy in worker.copies} == {"stuck"}
    assert sum(len(copy.blocks) for copy in worker.copies) <= 6, "a half of a fifth"
    assert len(worker.stores["disk"]) == 36


def test_who_lacks_what_is_being_copied_out_waits_and_loses_nothing() -> None:
    worker = TieredWorker(FULL, 12, tier(), at_once=False)
    first, second = prompt(1, 16), prompt(2, 20)
    worker.submit(first)
    worker.run()
    assert [type(copy) for copy in worker.copies] == [WriteTier]
    key = worker.submit(second, 12)  # 8 blocks in the end, of 7 that are not held
    worker.run()
    assert worker.kv.num_free_blocks == 0
    assert key in worker.core.sequences
    assert not worker.core.batcher.num_preemptions
    while worker.copies:
        worker.copy(worker.copies[0])
        worker.run()
    assert key not in worker.core.sequences
    assert worker.answer(key) == expected_tokens(FULL, second, 12)
    assert not worker.core.batcher.num_preemptions


def test_a_late_write_is_not_waited_for() -> None:
    worker = TieredWorker(FULL, 12, tier(), at_once=False)
    worker.submit(prompt(1, 16))
    worker.run()
    (late,) = worker.copies
    key = worker.submit(prompt(2, 20), 12)
    worker.run()
    assert not worker.core.batcher.num_preemptions
    worker.tick(SLOW_MS + 1)
    worker.run()
    assert worker.core.batcher.num_preemptions
    assert worker.copies[0] is late, "nothing more is given to it"
    worker.perform(worker.core.on_router_message(0, Cancel(key, "test")))
    worker.copy(late)
    assert worker.kv.num_free_blocks == worker.kv.num_usable_blocks - sum(
        len(copy.blocks) for copy in worker.copies
    )
    assert not any(isinstance(copy, ReadTier) for copy in worker.copies)
