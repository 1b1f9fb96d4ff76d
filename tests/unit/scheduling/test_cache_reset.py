"""What a worker answers to a reset; what it says of prefixes that only full attention has."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from disagg.kv.blocks.cache_policy import CachePolicy
from disagg.kv.blocks.retention import Retention
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.shapes.layout import plan_layout
from disagg.messages.identity import RequestKey
from disagg.messages.peer import AskLease, Reserve
from disagg.messages.reports import PrefillReport
from disagg.messages.sampling import SampledToken, SamplingParams
from disagg.messages.session import PrefixCacheReset, ResetPrefixCache
from disagg.messages.submit import PeerAddress, PullPlan, Role, Submit
from disagg.scheduling.actions import ToRouter, WorkerAction
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.stats import check_core, worker_stats
from disagg.scheduling.step import StepResult
from disagg.transfer.actions import Send
from tests.unit.scheduling.test_inbound_admission import ME, OWNER, submit
from tests.unit.scheduling.test_preempted_prefill import LIMITS


def core_with(**policy: Any) -> WorkerCore:
    layout = plan_layout([FullAttentionSpec(4, 1, 8, 4), SlidingWindowSpec(4, 1, 8, 4, 5)])
    kv = KVCacheCoordinator(
        layout, 64, max_model_tokens=64, max_step_tokens=16, policy=CachePolicy(**policy)
    )
    return WorkerCore(ME, layout, kv, BlockHasher(b"key", 4), LIMITS, lambda _: 1)


def reported(actions: Sequence[WorkerAction], kind: type) -> list[Any]:
    said = [action.message for action in actions if isinstance(action, ToRouter)]
    return [message for message in said if isinstance(message, kind)]


def serve(core: WorkerCore, name: str, tokens: Sequence[int], max_tokens: int = 1) -> PrefillReport:
    """A request up to its first token."""
    key = RequestKey(name, 1)
    asked = Submit(key, Role.LOCAL, tuple(tokens), (), b"", SamplingParams(max_tokens))
    core.on_router_message(0, asked)
    while True:
        step, _ = core.next_step(0)
        assert step is not None
        samples = tuple(SampledToken(7) if part.sampling else None for part in step.slices)
        actions = core.on_step_done(0, StepResult(step.step_id, samples))
        if found := reported(actions, PrefillReport):
            assert isinstance(found[0], PrefillReport)
            return found[0]


def reset(core: WorkerCore, number: int = 1) -> PrefixCacheReset:
    (answer,) = reported(core.on_router_message(0, ResetPrefixCache(number)), PrefixCacheReset)
    assert isinstance(answer, PrefixCacheReset)
    check_core(core)
    return answer


def test_an_idle_worker_forgets_all_and_says_how_much() -> None:
    core = core_with()
    serve(core, "a", range(16))
    assert serve(core, "b", range(16)).hit_tokens == 12
    assert reset(core, 5) == PrefixCacheReset(5, 8)
    assert serve(core, "c", range(16)).hit_tokens == 0
    assert reset(core, 6).num_forgotten == 8


def test_what_runs_goes_on_and_is_named_as_in_use() -> None:
    core = core_with()
    serve(core, "a", range(16), max_tokens=8)
    answer = reset(core)
    assert answer.num_forgotten
    assert answer.in_use == (("sequence", sum(core.kv.tables.num_held(RequestKey("a", 1)))),)
    for _ in range(7):
        step, _ = core.next_step(0)
        assert step is not None
        core.on_step_done(0, StepResult(step.step_id, (SampledToken(7),)))
    assert not core.sequences
    assert serve(core, "b", range(16)).hit_tokens == 0  # the rest of "a" was not published


def test_a_hand_over_on_its_way_publishes_nothing_later_and_who_waits_does() -> None:
    core = core_with()
    decode, waits = submit(1, Role.DECODE, 8), submit(2, Role.LOCAL, 8)
    for one in (decode, waits):
        core.on_router_message(0, one)
    assert reset(core) == PrefixCacheReset(1, 0)
    core.on_peer_message(0, OWNER, Reserve(decode.key, 1))
    assert dict(reset(core).in_use)["inbound"] > 0
    core.kv.commit_external(decode.key)
    assert core.kv.pool.cache.values() == ((), (), ())
    step, _ = core.next_step(0)
    assert step is not None
    core.on_step_done(0, StepResult(step.step_id, (SampledToken(7),)))
    assert all(core.kv.pool.cache.values()[:2])


def test_who_waits_pulls_nothing_any_more() -> None:
    """Its owner may hear of the reset later, and what it had before would be found here."""
    core = core_with()
    plan = PullPlan(PeerAddress(OWNER, "owner:1"), 12)
    asked = replace(submit(1, Role.LOCAL, 16), pull=plan)
    core.on_router_message(0, asked)
    reset(core)
    step, actions = core.next_step(0)
    assert step is not None, "it computes at once"
    assert not [one for one in actions if isinstance(one, Send)]
    later = replace(asked, key=RequestKey("later", 1))  # a negative control
    asks = [one.message for one in core.on_router_message(0, later) if isinstance(one, Send)]
    assert [one.key.request_id for one in asks if isinstance(one, AskLease)] == ["later"]


def test_a_worker_without_a_prefix_cache_refuses() -> None:
    core = core_with(enabled=False)
    serve(core, "a", range(16))
    answer = reset(core)
    assert answer.refused == "there is no prefix cache (cache.prefix_caching)"
    assert answer.num_forgotten == 0


def test_a_prefix_that_only_full_attention_has_is_reported() -> None:
    core = core_with(retention=Retention(0))
    first, second, third = (
        serve(core, name, [*range(16), *range(own, own + 12)])
        for name, own in (("a", 100), ("b", 200), ("c", 300))
    )
    assert (first.hit_tokens, first.uncached_common_tokens) == (0, 0)
    assert (second.hit_tokens, second.uncached_common_tokens) == (0, 16)
    assert (third.hit_tokens, third.uncached_common_tokens) == (16, 0)
    dense = core_with()
    serve(dense, "a", [*range(16), *range(100, 112)])
    found = serve(dense, "b", [*range(16), *range(200, 212)])
    assert (found.hit_tokens, found.uncached_common_tokens) == (16, 0)


def test_times_of_observed_blocks_are_in_the_stats() -> None:
    core = core_with(observe_every=1)
    core.tick(1_000)
    serve(core, "a", range(16))
    core.tick(3_000)
    serve(core, "b", range(16))
    gaps = {one.name: one for one in worker_stats(core).residency}["reuse_gap"]
    assert gaps.sum_ms == 2_000 * sum(gaps.counts)
    assert sum(gaps.counts) == 4  # twelve tokens: three blocks of full attention, one of the window
    assert worker_stats(core_with()).residency == ()
