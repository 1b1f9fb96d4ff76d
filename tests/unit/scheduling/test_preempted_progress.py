"""A decode that was preempted computes its prompt again: that is progress as well."""

from dataclasses import replace

import pytest

from disagg.kv.blocks.hits import CacheHit
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.sequence import KVSequence
from disagg.testing.simulation.config import FaultKind, PlannedFault, PlannedRequest
from tests.unit.scheduling.long_worlds import (
    HOUR_MS,
    LONG_TOKENS,
    MINUTE_MS,
    hour_long,
    outcomes,
    play,
    prompt,
)


def test_a_preempted_decode_that_computes_for_an_hour_again_is_not_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = KVCacheCoordinator.find_longest_cache_hit

    def evicted(self: KVCacheCoordinator, request: KVSequence, max_tokens: int) -> CacheHit:
        """Nothing is left of what it had: others took the blocks."""
        return find(self, request, 0)

    monkeypatch.setattr(KVCacheCoordinator, "find_longest_cache_hit", evicted)
    lost = PlannedFault(0, FaultKind.PREEMPT, "w0", at_ms=HOUR_MS + MINUTE_MS)
    script = (PlannedRequest(prompt(LONG_TOKENS), 200),)
    config = hour_long("hybrid", roles=("both",), output_tokens_max=300)
    world = play(replace(config, script=script, faults=(lost,)))
    assert sum(one.core.batcher.num_preemptions for one in world.workers.values()) == 1
    assert outcomes(world) == {"finished": 1}
    assert world.now_ms > 2 * HOUR_MS
