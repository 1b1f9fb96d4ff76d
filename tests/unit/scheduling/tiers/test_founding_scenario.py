"""A prompt, a long one that evicts it, and both again out of a tier."""

import pytest

from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.shapes.layout import plan_layout
from disagg.scheduling.tiers.index import WritePolicy
from disagg.testing.simulation.symbolic_engine import expected_tokens
from tests.unit.scheduling.tiers.tiered_worker import TieredWorker, tier

NUM_WINDOW_GROUPS = 5
NUM_ANSWER = 2


def prompt(number: int, num_tokens: int) -> tuple[int, ...]:
    return tuple((7 * i + number) % 997 for i in range(num_tokens))


def play(
    write: WritePolicy, *, short: int, long: int, block: int, window: int, step: int, blocks: int
) -> list[int]:
    """Play the requests; returns how many tokens came back for the short and the long prompt."""
    windows = [SlidingWindowSpec(block, 1, 8, 4, window)] * NUM_WINDOW_GROUPS
    layout = plan_layout([*windows, FullAttentionSpec(block, 1, 8, 4)])
    num_groups = len(layout.groups)
    assert num_groups == NUM_WINDOW_GROUPS + 1
    assert 3 * blocks < num_groups * (long // block), "not even a third of what full windows take"
    worker = TieredWorker(
        layout, blocks, tier(write=write), max_step_tokens=step, max_model_tokens=long + 10
    )
    reloaded = []
    first, second, third = prompt(3, short), prompt(5, long), prompt(9, long)
    for asked in (first, second):
        assert worker.ask(asked, NUM_ANSWER) == expected_tokens(layout, asked, NUM_ANSWER)
    assert not worker.counts.get("tier_loads")
    for asked in (first, second):
        before = dict(worker.counts)
        key = worker.submit(asked, NUM_ANSWER)
        worker.run()
        assert worker.answer(key) == expected_tokens(layout, asked, NUM_ANSWER)
        report, num_tokens = worker.report(key), worker.counts["tier_loaded_tokens"]
        num_tokens -= before.get("tier_loaded_tokens", 0)
        assert report.hit_tokens == num_tokens == len(asked) - report.computed_tokens
        num_read = worker.counts["tier_blocks_read_host"] - before.get("tier_blocks_read_host", 0)
        # All of full attention but what the pool still has, and of the windows what is seen.
        in_windows = NUM_WINDOW_GROUPS * -(-(window - 1) // block)
        assert in_windows < num_read <= num_tokens // block + in_windows
        reloaded.append(num_tokens)
        worker.ask(third)  # and evicts what is left of the second
    assert not worker.counts.get("tier_loads_failed")
    assert worker.kv.num_free_blocks == worker.kv.num_usable_blocks
    worker.kv.check()
    return reloaded


@pytest.mark.parametrize("write", ["publish", "eviction"])
def test_both_come_back_into_a_pool_too_small_for_full_windows(write: WritePolicy) -> None:
    reloaded = play(write, short=107, long=706, block=4, window=16, step=32, blocks=250)
    assert reloaded == [104, 704]


@pytest.mark.slow
@pytest.mark.parametrize("write", ["publish", "eviction"])
def test_the_numbers_of_the_founding_documents(write: WritePolicy) -> None:
    reloaded = play(
        write, short=10_007, long=70_006, block=128, window=1_024, step=2_048, blocks=700
    )
    assert reloaded == [9_984, 69_888]
