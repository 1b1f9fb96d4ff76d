"""The engine's block tables equal the coordinator's, though steps carry changes only."""

import random
from collections.abc import Callable, Iterator

import pytest

from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.sequence import KVSequence
from disagg.kv.shapes.layout import KVCacheLayout
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.sampling import SampledToken, SamplingParams
from disagg.messages.session import Cancel, EndReason
from disagg.messages.submit import Role, Submit
from disagg.scheduling.block_tables import BlockTables, SentTables
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.limits import WorkerLimits
from disagg.scheduling.step import SequenceSlice, Step, StepResult, TableChange
from tests.unit.scheduling.failure_worlds import LAYOUTS

MAX_SEQUENCES = 6
NUM_MOVES = 300


def new_core(
    layout: KVCacheLayout,
    num_blocks: int,
    max_step_tokens: int = 16,
    max_sequences: int = MAX_SEQUENCES,
    steps_max: int = 1,
    num_drafts: int = 0,
) -> WorkerCore:
    limits = WorkerLimits(
        max_model_tokens=100_000,
        max_step_tokens=max_step_tokens,
        max_sequences=max_sequences,
        max_waiting=100,
        handover_share_max=1.0,
        reserve_timeout_ms=100,
        reserve_passes_max=3,
        reservation_ttl_ms=5_000,
        lease_ttl_ms=5_000,
        committed_max=2,
        commit_repeat_ms=50,
        read_stuck_ms=1_000,
        steps_max=steps_max,
        blocks_per_read_max=4,
        quarantine_share_max=1.0,
    )
    kv = KVCacheCoordinator(
        layout,
        num_blocks,
        max_model_tokens=limits.max_model_tokens,
        max_step_tokens=steps_max * max_step_tokens,
        steps_max=steps_max,
        num_lookahead_tokens=num_drafts,
    )
    hasher = BlockHasher(b"key", layout.hash_block_tokens)
    return WorkerCore(Incarnation("w", "e"), layout, kv, hasher, limits, lambda _: 1)


def submit(core: WorkerCore, key: RequestKey, prompt: tuple[int, ...], max_tokens: int) -> None:
    sampling = SamplingParams(max_tokens=max_tokens)
    core.on_router_message(0, Submit(key, Role.LOCAL, prompt, (), b"", sampling))


def result_of(step: Step, rng: random.Random, *, fails: bool) -> StepResult:
    if fails:
        return StepResult(step.step_id, error="failed by the test")
    tokens = (SampledToken(rng.randrange(5)) if one.sampling else None for one in step.slices)
    return StepResult(step.step_id, tuple(tokens))


def steps_of(core: WorkerCore, rng: random.Random, *, fails: float = 0.0) -> Iterator[Step]:
    """Steps of a worker whose clients come and go at any moment; memory is short."""
    next_id = 0
    live: list[RequestKey] = []
    in_flight: Step | None = None
    for _ in range(NUM_MOVES):
        if rng.random() < 0.3 and len(core.sequences) < 2 * MAX_SEQUENCES:
            live.append(RequestKey(str(next_id), 1))
            next_id += 1
            prompt = tuple(rng.randrange(3) for _ in range(rng.randint(1, 40)))
            submit(core, live[-1], prompt, rng.randint(1, 30))
        if live and rng.random() < 0.1:
            key = live.pop(rng.randrange(len(live)))
            core.on_router_message(0, Cancel(key, "the client went away"))
        if in_flight is not None and rng.random() < 0.8:
            core.on_step_done(0, result_of(in_flight, rng, fails=rng.random() < fails))
            in_flight = None
        if in_flight is None:
            in_flight, _ = core.next_step(0)
            if in_flight is not None:
                yield in_flight


def differences(core: WorkerCore, tables: BlockTables, step: Step) -> list[RequestKey]:
    """The sequences of a step whose tables the engine does not have as the coordinator has."""
    return [
        part.key
        for part in step.slices
        if [list(table) for table in tables[part.key]] != list(core.kv.tables.blocks(part.key))
    ]


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@pytest.mark.parametrize("seed", range(3))
def test_the_engine_has_the_tables_of_the_launch(name: str, seed: int) -> None:
    rng = random.Random(f"{name} {seed}")
    layout = LAYOUTS[name]
    core = new_core(layout, num_blocks=24 * len(layout.groups))
    tables = BlockTables(len(layout.groups), core.kv.pool.num_blocks)
    num_slices = num_ended = num_new = 0
    for step in steps_of(core, rng, fails=0.02):
        tables.apply(step)
        assert differences(core, tables, step) == []
        assert len(tables) <= MAX_SEQUENCES
        num_slices += len(step.slices)
        num_ended += len(step.ended)
        num_new += sum(part.is_new for part in step.slices)
    assert num_new - len(tables) <= num_ended <= num_new
    assert 10 < num_new < num_slices / 2


def test_memory_was_short() -> None:
    """Control: the walks above preempt."""
    layout = LAYOUTS["window_full"]
    core = new_core(layout, num_blocks=24 * len(layout.groups))
    for _ in steps_of(core, random.Random(1)):
        pass
    assert core.batcher.num_preemptions > 0


SPOILERS: dict[str, Callable[[Step], Step]] = {
    "a step whose changes are not made": lambda step: Step(step.step_id, (), step.ended),
    "nothing leaves the window": lambda step: _changed(
        step, lambda one: TableChange(0, one.new_blocks)
    ),
    "a block too few": lambda step: _changed(
        step, lambda one: TableChange(min(one.num_skipped, 1), one.new_blocks[:-1])
    ),
}


def _changed(step: Step, change: Callable[[TableChange], TableChange]) -> Step:
    slices = (
        SequenceSlice(
            one.key, (0,), 0, one.is_new, tuple(change(each) for each in one.table_changes)
        )
        for one in step.slices
    )
    return Step(step.step_id, tuple(slices), step.ended)


@pytest.mark.parametrize("name", sorted(SPOILERS))
def test_control_a_spoiled_step_is_seen(name: str) -> None:
    layout = LAYOUTS["window_full"]
    core = new_core(layout, num_blocks=24 * len(layout.groups))
    tables = BlockTables(len(layout.groups), core.kv.pool.num_blocks)
    seen = ""
    for number, step in enumerate(steps_of(core, random.Random(1))):
        try:
            tables.apply(SPOILERS[name](step) if number % 5 == 4 else step)
            seen = seen or f"{differences(core, tables, step) or ''}"
        except (KeyError, ValueError) as error:
            seen = seen or repr(error)
    assert seen


NUM_NEW = (10, 7, 9, 1, 20, 3)


def test_two_steps_in_flight_carry_the_changes_of_each() -> None:
    """The second is launched before the engine has seen the first; a third after both."""
    layout = LAYOUTS["window_full"]
    kv = KVCacheCoordinator(layout, 64, max_model_tokens=100, max_step_tokens=20, steps_max=2)
    key = RequestKey("r", 1)
    request = KVSequence(key, list(range(100)), [])
    sent: SentTables | None = None
    steps: list[Step] = []
    at_launch: list[list[list[int]]] = []
    tables = BlockTables(len(layout.groups), 64)
    for number, num_new in enumerate(NUM_NEW):
        assert kv.allocate(request, num_new_tokens=num_new)
        is_new, sent = sent is None, sent or SentTables(kv, key)
        part = SequenceSlice(key, (0,) * num_new, 0, is_new, sent.take_changes())
        steps.append(Step(number, (part,)))
        at_launch.append([list(table) for table in kv.tables.blocks(key)])
        kv.hold_step(number, [key])
        if number:
            tables.apply(steps[number - 1])
            assert [list(table) for table in tables[key]] == at_launch[number - 1]
            kv.release_step(number - 1)
            kv.publish(key, sum(NUM_NEW[:number]))
    assert any(0 in table for table in at_launch[-1])  # the window moved


class CountedBlocks(list[int]):
    """A block table that counts the entries somebody has read."""

    num_read = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        found = super().__getitem__(index)
        CountedBlocks.num_read += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self):  # type: ignore[no-untyped-def]
        CountedBlocks.num_read += len(self)
        return super().__iter__()


@pytest.mark.parametrize("num_tokens", [100, 1_000, 4_000])
def test_a_decode_step_copies_what_changed(num_tokens: int) -> None:
    layout = LAYOUTS["window_full"]
    core = new_core(layout, num_blocks=4 * num_tokens, max_step_tokens=num_tokens)
    for number in range(3):
        submit(core, RequestKey(str(number), 1), (number,) * num_tokens, 1_000)
    rng = random.Random(1)
    while any(seq.num_tokens == num_tokens for seq in core.sequences.values()):
        step, _ = core.next_step(0)
        assert step is not None
        core.on_step_done(0, result_of(step, rng, fails=False))
    for manager in core.kv.managers:
        for grown in manager.tables.values():
            grown.blocks = CountedBlocks(grown.blocks)
    CountedBlocks.num_read = num_sent = num_changes = 0
    for _ in range(40):
        step, _ = core.next_step(0)
        assert step is not None
        assert len(step.slices) == 3
        changes = [change for part in step.slices for change in part.table_changes]
        num_changes += len(changes)
        num_sent += sum(len(change.new_blocks) for change in changes)
        core.on_step_done(0, result_of(step, rng, fails=False))
    num_groups, num_new = len(layout.groups), 40 // 4
    assert num_sent == 3 * num_groups * num_new
    assert num_changes <= 2 * num_sent
    # Each new entry is copied here; dropping and publishing look at each once or twice more.
    assert CountedBlocks.num_read <= 4 * num_sent
    # Control: whole tables would be counted.
    for table in core.kv.tables.blocks(RequestKey("0", 1)):
        tuple(table)
    assert CountedBlocks.num_read > num_tokens // 4


KEY, OTHER = RequestKey("r", 1), RequestKey("other", 1)


def part_of(key: RequestKey, *changes: TableChange, is_new: bool = False) -> SequenceSlice:
    return SequenceSlice(key, (5,), 0, is_new, changes)


REFUSED = {
    "of nobody": part_of(RequestKey("unknown", 1)),
    "of a group too few": part_of(KEY, TableChange(0, (4,))),
    "block ids beyond the pool": part_of(KEY, TableChange(0, (8,)), TableChange(0, ())),
    "block ids below 0": part_of(KEY, TableChange(0, ()), TableChange(0, (-1,))),
    "entries that come back": part_of(KEY, TableChange(0, ()), TableChange(0, (4,))),
    "more skipped than there are": part_of(KEY, TableChange(3, (4,)), TableChange(1, ())),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_changes_that_cannot_be_made(name: str) -> None:
    """They fail the step, spoil no other sequence, and leave nothing to compute from."""
    tables = BlockTables(2, 8)
    first = TableChange(0, (1,)), TableChange(1, (0, 2))
    tables.apply(Step(0, (part_of(KEY, *first, is_new=True), part_of(OTHER, *first, is_new=True))))
    bad = REFUSED[name]
    good = part_of(OTHER, TableChange(0, (3,)), TableChange(2, (4,)))
    with pytest.raises(ValueError, match=bad.key.request_id):
        tables.apply(Step(1, (bad, good)))
    assert [list(table) for table in tables[OTHER]] == [[1, 3], [0, 0, 4]]
    with pytest.raises(KeyError):
        tables[bad.key]


def test_ended_sequences_are_forgotten_before_the_slices_are_looked_at() -> None:
    tables = BlockTables(1, 8)
    tables.apply(Step(0, (part_of(KEY, TableChange(0, (1, 2)), is_new=True),)))
    tables.apply(Step(1, (part_of(KEY, TableChange(0, (3,)), is_new=True),), ended=(KEY,)))
    assert [list(table) for table in tables[KEY]] == [[3]]
    with pytest.raises(ValueError, match="not here"):
        tables.apply(Step(2, (part_of(KEY),), ended=(KEY, OTHER)))
    assert len(tables) == 0


def test_no_token_id_is_printed() -> None:
    layout = LAYOUTS["full"]
    core = new_core(layout, num_blocks=24)
    submit(core, KEY, (987_654, 876_543), 1)
    step, _ = core.next_step(0)
    assert step is not None
    assert step.slices[0].token_ids == (987_654, 876_543)
    for shown in (repr(step), f"{step}", repr(step.slices[0]), repr([step.slices])):
        assert "987" not in shown
        assert "2 tokens" in shown


def test_a_failed_step_ends_its_sequences_at_the_engine_too() -> None:
    layout = LAYOUTS["full"]
    core = new_core(layout, num_blocks=24)
    submit(core, KEY, (5, 6), 4)
    step, _ = core.next_step(0)
    assert step is not None
    actions = core.on_step_done(0, StepResult(step.step_id, error="failed by the test"))
    assert EndReason.STEP_FAILED in repr(actions)
    submit(core, OTHER, (5, 6), 4)
    step, _ = core.next_step(0)
    assert step is not None
    assert step.ended == (KEY,)
