"""A reset of the prefix cache in the midst of everything: nothing from before is found after it."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from disagg.kv.blocks.cache_policy import CachePolicy
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.sequence import KVSequence
from disagg.kv.shapes.layout import KVCacheLayout
from disagg.messages.kv_events import AllCleared
from tests.unit.kv.machine_world import settings_of
from tests.unit.kv.test_machine import Machine

FULL = FullAttentionSpec(4, 1, 4, 2)
WINDOW = SlidingWindowSpec(4, 1, 4, 2, 9)


class ResetMachine(Machine):
    """The random lives, reset now and then; every invariant of theirs holds as well."""

    @rule()
    def reset(self) -> None:
        self.silent = getattr(self, "silent", set()) | set(self.live)
        before = {block for index in self.indexes() for block in index.values()}
        assert self.kv.forget_prefixes() >= len(before)
        assert not any(self.indexes())

    def indexes(self) -> list[Any]:
        return [self.kv.pool.cache.index(group) for group in range(self.kv.pool.num_groups)]

    @invariant()
    def nothing_from_before_is_found(self) -> None:
        for key in getattr(self, "silent", set()) & set(getattr(self, "live", {})):
            for table in self.kv.tables.blocks(key):
                assert not any(map(self.kv.pool.cache.has, filter(None, table)))


def test_machine_with_resets() -> None:
    run_state_machine_as_test(ResetMachine, settings=settings_of(100))


def goes_on_publishing(kv: Any) -> None:
    """The cache is cleared; who has begun publishes what he computes from then on."""
    kv.forget_prefixes = kv.pool.clear_cache


def keeps_the_index(kv: Any) -> None:
    """Nobody publishes any more, but what was published stays."""
    kv.pool.clear_cache = lambda: 10_000


@pytest.mark.parametrize("patch", [goes_on_publishing, keeps_the_index])
def test_a_broken_reset_is_caught(patch: Callable[[Any], None]) -> None:
    class Broken(ResetMachine):
        coordinator_patch = staticmethod(patch)

    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(Broken, settings=settings_of(400))


def coordinator(**policy: Any) -> KVCacheCoordinator:
    layout = KVCacheLayout.one_layer_per_group([FULL, WINDOW])
    return KVCacheCoordinator(
        layout, 100, max_model_tokens=200, max_step_tokens=64, policy=CachePolicy(**policy)
    )


def prompt(key: str, num_tokens: int = 40) -> KVSequence:
    made = KVSequence(key, list(range(num_tokens)))
    BlockHasher(b"test", 4).extend(made.hashes, made.token_ids)
    return made


def compute(kv: KVCacheCoordinator, made: KVSequence) -> int:
    """Compute a prompt in one step; returns the tokens that it hit."""
    hit = kv.find_longest_cache_hit(made, made.num_tokens - 1)
    assert kv.allocate(made, num_new_tokens=made.num_tokens - hit.num_tokens, hit=hit)
    kv.publish(made.key, made.num_tokens)
    return hit.num_tokens


def test_what_a_running_sequence_computes_afterwards_is_not_found() -> None:
    kv = coordinator()
    running = prompt("a")
    compute(kv, running)
    assert kv.forget_prefixes() == 20
    running.token_ids += range(100, 120)
    BlockHasher(b"test", 4).extend(running.hashes, running.token_ids)
    assert kv.allocate(running, num_new_tokens=20)
    kv.publish("a", 60)
    assert kv.pool.cache.values() == ((),) * 3
    assert compute(kv, prompt("b")) == 0  # and what begins after it is found again
    assert compute(kv, prompt("c")) == 36
    for key in "abc":
        kv.free(key)
    kv.check()


def test_a_reset_is_announced() -> None:
    kv = coordinator()
    compute(kv, prompt("a"))
    kv.forget_prefixes()
    batch = kv.events.since(0)
    assert batch is not None
    assert batch.events[-1] == AllCleared()


def test_without_a_prefix_cache_nothing_is_found_or_announced() -> None:
    kv = coordinator(enabled=False)
    assert [compute(kv, prompt(key)) for key in "abc"] == [0, 0, 0]
    assert kv.events.next_seq == 0
    assert kv.forget_prefixes() == 0
    for key in "abc":
        kv.free(key)
    kv.check()
    assert kv.num_free_blocks == kv.num_usable_blocks
    control = coordinator()
    assert [compute(control, prompt(key)) for key in "abc"] == [0, 36, 36]
