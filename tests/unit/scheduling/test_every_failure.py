"""Every kind of group, every point of failure: exact tokens, nothing held, no more lost."""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace

import pytest

from disagg.errors import ConfigError
from disagg.kv.kinds.chunked_local import ChunkedLocalManager
from disagg.kv.kinds.cross_attention import CrossAttentionSpec
from disagg.kv.kinds.linear_state import LinearStateManager
from disagg.kv.kinds.manager import GroupManager
from disagg.kv.kinds.sliding_window import SlidingWindowManager
from disagg.kv.prefix_match import PrefixMatcher
from disagg.kv.prefix_sharing import PrefixSharing
from disagg.kv.sequence import KVSequence
from disagg.kv.shapes.layout import plan_layout
from disagg.messages.reports import TransferKind
from disagg.routing.record import GenerationRecord
from disagg.scheduling.handover.budget import HandoverBudget
from disagg.testing.simulation.config import FaultKind, PlannedFault, SimulationConfig
from disagg.testing.simulation.failed_read import FailedRead
from disagg.testing.simulation.simulation import Simulation
from disagg.transfer.reader.table import InboundTable
from tests.unit.scheduling.failure_worlds import (
    FULL,
    LAYOUTS,
    NUM_FIRST,
    NUM_SHARED,
    PAIR_FAULTS,
    TRIO_FAULTS,
    Fault,
    causes,
    counted,
    counted_by_workers,
    first_causes,
    generations,
    longest_intact,
    outcomes,
    play,
    pull_causes,
    three_workers,
    two_turns,
    with_fault,
)

STRIDE = 5
"""One in so many events here, elsewhere for each fault; all of them in the slow tests."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_undisturbed_it_pulls_and_hands_over_twice(layout: str) -> None:
    world = play(two_turns(LAYOUTS[layout]))
    assert outcomes(world) == ["finished", "finished"]
    assert (world.num_pulls, world.num_handovers) == (1, 2)
    assert not causes(world)


# -- the READ of every block ------------------------------------------------------------------


def fail_read(config: SimulationConfig, number: int) -> FailedRead:
    """A run in which one READ fails: exact tokens, named and counted, the rest kept."""
    world = play(replace(config, failing_reads=(number,)))
    assert set(outcomes(world)) == {"finished"}
    (lost,) = world.failed_reads
    record = world.router.record(lost.key.request_id)
    assert record is not None
    tries = [one for one in record.generations if one.generation >= lost.key.generation]
    names = ", ".join(f"{group}:{position}" for group, position in sorted(lost.failed))
    named = f"read_failed: blocks {names} (group:block)"
    if lost.kind is TransferKind.PREFIX:
        (after,) = tries
        assert after.pull is not None
        assert after.pull.failed.startswith(named)
        assert pull_causes(world) == {"read_failed": 1}
        assert counted(world, "prefix_pulls")["read_failed"] == 1
        assert counted_by_workers(world, "prefix_pulls_failed_read_failed") == 1
        assert not causes(world)
    else:
        failed, after = tries
        assert failed.cause.startswith(named)
        assert causes(world) == counted(world, "replans") == {"read_failed": 1}
        assert counted_by_workers(world, "transfers_failed_read_failed") == 1
        assert counted_by_workers(world, "parts_ended_read_failed") == 1
    check_kept(world, lost, after)
    return lost


def check_kept(world: Simulation, lost: FailedRead, after: GenerationRecord) -> None:
    """It went on where it failed, from all that is there, or that another owner has."""
    kept = longest_intact(world.config.layout, lost, after.num_prompt_tokens)
    assert after.prefill == (after.decode if lost.kind is TransferKind.HANDOVER else lost.reader)
    assert lost.reader == after.prefill
    elsewhere = NUM_SHARED if lost.reader.worker_id == "w2" else 0
    assert after.computed_tokens == after.num_prompt_tokens - max(kept, elsewhere), (lost, kept)
    if elsewhere:
        assert (after.hit_tokens, after.pulled_tokens) == (kept, max(0, elsewhere - kept))


@pytest.mark.parametrize("blocks_per_read", [1, 4])
@pytest.mark.parametrize("num_first", [20, 21])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_read_of_every_block_fails(layout: str, num_first: int, blocks_per_read: int) -> None:
    config = two_turns(LAYOUTS[layout], num_first, blocks_per_read)
    found = set()
    for number in range(1, play(config).num_reads + 1):
        lost = fail_read(config, number)
        found |= {(lost.kind, group) for group, _ in lost.failed}
    groups = {group for _, group in found}
    assert groups == set(range(len(LAYOUTS[layout].groups)))
    assert {kind for kind, _ in found} == set(TransferKind)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_did_not_arrive_comes_from_another_owner(layout: str) -> None:
    config = three_workers(LAYOUTS[layout])
    readers = {
        fail_read(config, number).reader.worker_id
        for number in range(1, play(config).num_reads + 1)
    }
    assert "w2" in readers


@pytest.mark.parametrize("layout", ["window_full", "chunks_full", "states_window_full"])
def test_two_reads_fail_of_one_owner_or_of_one_after_the_other(layout: str) -> None:
    """Every two READs of the second request: of the hand-over, or of what came in its place."""
    config = three_workers(LAYOUTS[layout])
    calm = play(config)
    assert not calm.num_pulls
    num_pulls_failed = 0
    for first in range(1, calm.num_reads + 1):
        once = play(replace(config, failing_reads=(first,)))
        if once.failed_reads[0].reader.worker_id != "w2":
            continue
        for second in range(first + 1, once.num_reads + 1):
            world = play(replace(config, failing_reads=(first, second)))
            assert outcomes(world) == ["finished", "finished"]
            one, other = world.failed_reads
            after = generations(world)[-1]
            if one.key == other.key:
                check_kept(world, replace(other, failed=one.failed + other.failed), after)
            else:
                num_pulls_failed += 1
                assert other.kind is TransferKind.PREFIX
                kept = longest_intact(LAYOUTS[layout], other, after.num_prompt_tokens)
                assert after.computed_tokens == after.num_prompt_tokens - kept
                assert pull_causes(world) == counted(world, "prefix_pulls") == {"read_failed": 1}
            assert causes(world) == {"read_failed": 1}
    assert num_pulls_failed


# -- a fault at every event -------------------------------------------------------------------

CAUSES = {
    FaultKind.KILL: {"worker_lost", "read_failed", "take_over_refused"},
    FaultKind.CUT: {"peer_lost", "take_over_refused"},
    FaultKind.EXPIRE: {"lease_dead"},
    FaultKind.PREEMPT: set[str](),
    FaultKind.CANCEL: set[str](),
}
"""Why a plan may be given up, in the words of whoever noticed first. A death may be noticed by its
READs; a take-over is refused where the commit had got through."""
PULL_CAUSES = CAUSES | {FaultKind.KILL: {"peer_lost", "read_failed"}}


def befall(config: SimulationConfig, event: int, fault: Fault, seed: int = 1) -> Counter[str]:
    """A run with one fault: exact tokens for all who stayed; what came of it, counted alike."""
    world = play(with_fault(config, event, fault), seed)
    kind, worker, _ = fault
    ends = Counter(outcomes(world))
    assert ends.keys() <= ({"finished", "cancelled"} if kind is FaultKind.CANCEL else {"finished"})
    assert counted(world, "requests_ended")["cancelled"] == ends["cancelled"]
    replans, pulls = causes(world), pull_causes(world)
    assert replans == counted(world, "replans")
    told = counted(world, "prefix_pulls")
    assert told.pop("committed", 0) <= world.num_pulls  # who dies tells nobody
    assert pulls == told
    assert first_causes(world) <= CAUSES[kind]
    assert pulls.keys() <= PULL_CAUSES[kind], pulls
    if kind is FaultKind.KILL:
        assert replans["worker_lost"] <= counted(world, "workers_lost").total() <= 1
    elif kind is FaultKind.EXPIRE and (replans or pulls):
        assert world.workers[worker].core.counters.counts["leases_expired"] == 1
    if kind is not FaultKind.KILL:
        assert all(counted_by_workers(world, f"parts_ended_{cause}") for cause in replans)
    return replans + pulls + Counter(cancelled=ends["cancelled"])


def befall_all(
    config: SimulationConfig, faults: list[Fault], stride: int, seed: int = 1
) -> dict[Fault, Counter[str]]:
    """Each fault before each event, one run for each; what came of each fault."""
    num_events = play(config, seed).num_events
    came: dict[Fault, Counter[str]] = {}
    for offset, fault in enumerate(faults):
        came[fault] = Counter()
        for event in range(1 + offset % stride, num_events + 1, stride):
            came[fault] += befall(config, event, fault, seed)
    for fault, counts in came.items():
        assert counts or fault[0] is FaultKind.PREEMPT, f"{fault} never mattered"
    return came


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fault_at_one_event_in_five(layout: str) -> None:
    befall_all(two_turns(LAYOUTS[layout]), PAIR_FAULTS, STRIDE)


@pytest.mark.parametrize("layout", ["window_full", "states_full"])
def test_a_fault_where_a_third_worker_is_left(layout: str) -> None:
    befall_all(three_workers(LAYOUTS[layout]), TRIO_FAULTS, STRIDE)


@pytest.mark.parametrize("layout", ["windows", "states_window_full"])
def test_an_error_only_where_both_workers_are_lost(layout: str) -> None:
    config = two_turns(LAYOUTS[layout])
    ends = set()
    for event in range(1, play(config).num_events + 1, STRIDE):
        faults = tuple(PlannedFault(event + n, FaultKind.KILL, f"w{n}") for n in (0, 1))
        ends |= set(outcomes(play(replace(config, faults=faults))))
    errors = ends - {"finished"}
    assert errors
    assert all("2 workers were lost" in one or "no worker is ready" in one for one in errors), ends


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "num_first"), [(1, 21), (2, 20)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fault_at_every_event(layout: str, seed: int, num_first: int) -> None:
    befall_all(two_turns(LAYOUTS[layout], num_first), PAIR_FAULTS, 1, seed)
    befall_all(three_workers(LAYOUTS[layout]), TRIO_FAULTS, 1, seed)


# -- what must be found ------------------------------------------------------------------------

Mutate = Callable[[pytest.MonkeyPatch], None]


def finds(run: Callable[..., object], *args: object) -> bool:
    """Whether a run shows that something is broken: tokens, invariants, holds or counts."""
    try:
        run(*args)
    except AssertionError:  # InvariantViolation is one
        return True
    return False


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_that_did_not_arrive_is_found_wherever_it_is(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every READ that fails is taken for one that did not."""
    config = two_turns(LAYOUTS[layout])
    num_reads = play(config).num_reads
    done = InboundTable.on_read_done

    def believing(self: InboundTable, now_ms: int, read_id: int, error: str = "") -> None:
        done(self, now_ms, read_id)

    monkeypatch.setattr(InboundTable, "on_read_done", believing)
    for number in range(1, num_reads + 1):
        assert finds(play, replace(config, failing_reads=(number,))), number


@pytest.mark.parametrize("layout", [one for one in LAYOUTS if one != "state"])
def test_a_failed_block_that_is_published_is_found_in_every_group(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One state of one block is left out: without it nothing arrived, so nothing is published."""
    config = two_turns(LAYOUTS[layout])
    groups = {
        number: {group for group, _ in fail_read(config, number).failed}
        for number in range(1, play(config).num_reads + 1)
    }
    publish = PrefixSharing.publish_intact

    def everything(
        self: PrefixSharing,
        request: KVSequence,
        num_tokens: int,
        failed: Collection[tuple[int, int]],
    ) -> None:
        publish(self, request, num_tokens, ())

    monkeypatch.setattr(PrefixSharing, "publish_intact", everything)
    found = set()
    for number, concerned in groups.items():
        if finds(play, replace(config, failing_reads=(number,))):
            found |= concerned
    assert found == set().union(*groups.values())


@pytest.mark.parametrize("layout", [one for one in LAYOUTS if "state" not in one])
def test_it_is_found_that_too_little_is_kept(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With states only the end of what was pulled can be gone on from: all of it, or nothing."""
    config = two_turns(LAYOUTS[layout])
    num_reads = play(config).num_reads
    monkeypatch.setattr(PrefixSharing, "publish_intact", lambda *_: None)
    assert any(finds(fail_read, config, number) for number in range(1, num_reads + 1))


def hands_over_an_older_state(patch: pytest.MonkeyPatch) -> None:
    """The state that the last step started from, in the place of the one it left."""
    right = LinearStateManager.in_window_blocks

    def older(self: LinearStateManager, key: Hashable, num_tokens: int) -> list[tuple[int, int]]:
        pairs = right(self, key, num_tokens)
        before = [block for block in self.tables[key].blocks if block][: len(pairs)]
        return [(place, block) for (place, _), block in zip(pairs, before, strict=True)]

    patch.setattr(LinearStateManager, "in_window_blocks", older)


def finds_an_older_state(patch: pytest.MonkeyPatch) -> None:
    """A cached state counts for every longer prefix."""
    right = LinearStateManager.match

    def longer(
        self: LinearStateManager,
        groups: Sequence[int],
        hashes: Sequence[bytes],
        max_tokens: int,
        alignment_tokens: int,
        drop_last: bool,
    ) -> tuple[list[int], ...]:
        runs = right(self, groups, hashes, max_tokens, alignment_tokens, drop_last)
        end = min(max_tokens // alignment_tokens * alignment_tokens // 4, len(hashes))
        size = self.blocks_per_state
        return tuple(run + run[-size:] * (end - len(run) // size) for run in runs)

    patch.setattr(LinearStateManager, "match", longer)


def believes_one_group(patch: pytest.MonkeyPatch) -> None:
    """What full attention has counts for all groups."""
    patch.setattr(PrefixMatcher, "find", PrefixMatcher.find_always_visible)


def sees_too_little(manager: type[GroupManager]) -> Mutate:
    """Two blocks too many count as out of sight."""
    right = manager.skipped_tokens

    def more(self: GroupManager, num_computed: int) -> int:
        return min(right(self, num_computed) + 8, num_computed)

    return lambda patch: patch.setattr(manager, "skipped_tokens", more)


@pytest.mark.parametrize(
    ("mutate", "layouts"),
    [
        (hands_over_an_older_state, ["state", "states_full", "states_window_full"]),
        (finds_an_older_state, ["states_full", "states_window_full"]),
        (believes_one_group, ["window_full", "chunks_full", "states_full", "chunks_window_mla"]),
        (sees_too_little(SlidingWindowManager), ["windows", "window_full"]),
        (sees_too_little(ChunkedLocalManager), ["chunks", "chunks_full"]),
    ],
)
def test_what_breaks_a_kind_is_found_without_any_fault(
    mutate: Mutate, layouts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    for layout in layouts:
        pulls = two_turns(LAYOUTS[layout])
        own = replace(pulls, pull_tokens_min=100)  # goes on from its own hit
        # Decoding left pages behind the last state that is kept.
        alone = replace(two_turns(LAYOUTS[layout], NUM_FIRST + 4), roles=("both",))
        ways = pulls, own, alone
        assert any([finds(play, one) for one in ways]), layout


def test_what_is_not_given_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HandoverBudget, "give_back", lambda *_: None)
    config = replace(two_turns(LAYOUTS["full"]), time_limit_ms=5_000)
    assert finds(play, config)


def test_cross_attention_is_refused_by_name() -> None:
    config = SimulationConfig(plan_layout([CrossAttentionSpec(4, 1, 8, 4, 6), FULL]))
    with pytest.raises(ConfigError, match="cross_attention"):
        play(config)
