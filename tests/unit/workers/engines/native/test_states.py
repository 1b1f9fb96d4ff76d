"""Linear states: whatever a token left behind is in the blocks of its sequence and nowhere else."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.workers.engines.native.families import SUPPORTED
from disagg.workers.engines.native.native_engine import NativeEngine
from tests.checkpoints import make_checkpoint
from tests.tiny_families import FAMILIES
from tests.unit.workers.engines.native.runs import Runs, clear_prompt, coordinator, is_as_expected
from tests.unit.workers.engines.native.sequences import Pool, run_one
from tests.unit.workers.engines.serving import GREEDY

STATES = sorted(
    name for name, tiny in FAMILIES.items() if SUPPORTED[tiny.model.__name__].has_states
)
BLOCK = 4
PLENTY = 400


@pytest.fixture(scope="module", params=STATES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def engines(directory: Path) -> Iterator[tuple[NativeEngine, NativeEngine]]:
    """Two of one model, with pools of different sizes."""
    made = [NativeEngine(directory, num_blocks=n, block_tokens=BLOCK) for n in (PLENTY, PLENTY + 9)]
    yield made[0], made[1]
    for engine in made:
        engine.close()


def state_group(engine: NativeEngine) -> int:
    (group,) = (g.group for g in engine.layout.groups if isinstance(g.spec, LinearStateSpec))
    assert engine.layout.groups[group].blocks_per_state > 1
    return group


FAULTS = ("none", "states stay behind", "states of nothing", "a state one token later")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_copy_of_the_blocks_is_a_hand_over(
    directory: Path, engines: tuple[NativeEngine, NativeEngine], fault: str
) -> None:
    """Into other blocks of another engine's pool, mid-way and at the prompt's end."""
    one, other = engines
    prompt, expected = clear_prompt(directory, 37)
    for at in (0, 4):  # sampled tokens: after the prompt, and in the middle of decoding
        for engine in engines:
            engine.pool.poison(range(1, engine.pool.num_blocks))
        here = Runs(one, coordinator(one), prompt)
        samples = [here.step(num) for num in (5, 17, 15)] + [here.step(1) for _ in range(at)]
        num_known = here.computed
        assert is_as_expected(samples[2:], expected, 0)
        there = Runs(other, coordinator(other), here.sequence.token_ids)
        reserved = there.kv.reserve_external(there.sequence, num_known)
        assert reserved is not None
        blocks = here.kv.tables.in_window_blocks(here.sequence.key, num_known)
        if fault == "a state one token later":
            here.step(1)
        for group, (mine, theirs) in enumerate(zip(blocks, reserved.lacks, strict=True)):
            assert [index for index, _ in mine] == [index for index, _ in theirs]
            for (_, source), (_, target) in zip(mine, theirs, strict=True):
                if group == state_group(one) and fault == "states stay behind":
                    continue
                other.pool.tensor[target] = one.pool.tensor[source]
                if group == state_group(one) and fault == "states of nothing":
                    other.pool.tensor[target] = 0
        there.kv.commit_external(there.sequence.key)
        there.computed = num_known
        if fault == "states stay behind":
            there.step(1, is_ok=False)
            continue
        rest = [there.step(1) for _ in range(GREEDY.max_tokens - at - 1)]
        assert is_as_expected(rest, expected, at + 1) is (fault == "none")


@pytest.mark.parametrize("at", [24, 20], ids=["right", "of another position"])
def test_a_hit_goes_on_from_a_snapshot(
    directory: Path, engines: tuple[NativeEngine, NativeEngine], at: int
) -> None:
    prompt, expected = clear_prompt(directory, 37)
    engine = engines[0]
    engine.pool.poison(range(1, PLENTY))
    kv, group = coordinator(engine), state_group(engine)
    first = Runs(engine, kv, prompt)
    snapshots = {}
    for num in (5, 15, 4, 2):  # ends at two block ends, 20 and 24, and beyond
        first.step(num)
        size = engine.layout.groups[group].blocks_per_state
        snapshots[first.computed] = kv.tables.blocks(first.sequence.key)[group][-size:]
    kv.free(first.sequence.key)
    engine.pool.tensor[snapshots[24]] = engine.pool.tensor[snapshots[at]].clone()
    before = engine.pool.tensor[snapshots[24]].clone()
    again = Runs(engine, kv, prompt)
    assert again.start_from_hit() == 24
    samples = [again.step(13), *(again.step(1) for _ in range(GREEDY.max_tokens - 1))]
    assert is_as_expected(samples, expected, 0) is (at == 24)
    assert torch.equal(engine.pool.tensor[snapshots[24]], before)  # it stays for the next one


def test_a_step_writes_the_state_at_its_end_only(
    engines: tuple[NativeEngine, NativeEngine],
) -> None:
    engine = engines[0]
    pool = Pool(engine, random.Random(2))
    seq = pool.start("a", range(10, 60))
    assert run_one(engine, pool.slice(seq, 17)) == ""
    seq.computed = 17
    part = pool.slice(seq, 6)
    before = engine.pool.tensor.clone()
    assert run_one(engine, part) == ""
    changed = set((engine.pool.tensor != before).any(1).nonzero().flatten().tolist())
    written = {
        block
        for group, table in zip(engine.layout.groups, seq.tables, strict=True)
        for block in (
            table[-group.blocks_per_state :] if group.group == state_group(engine) else table[4:]
        )
    }
    assert changed == written
