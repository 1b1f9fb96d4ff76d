"""Prompts of models with linear states are found again: their chunks end where states are kept."""

import random
from collections import defaultdict, deque
from collections.abc import Mapping
from itertools import pairwise

import pytest

from disagg.kv.chunking import Chunking
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.linear_state import LinearStateManager, LinearStateSpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.shapes.layout import plan_layout
from disagg.messages.identity import RequestKey
from disagg.messages.reports import PrefillReport
from disagg.scheduling.actions import ToRouter
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.limits import STEPS_MAX
from disagg.scheduling.step import Step
from disagg.workers.engines.block_tokens import DEFAULT
from disagg.workers.options import WorkerOptions
from tests.unit.scheduling.long_worlds import prompt
from tests.unit.scheduling.test_block_tables import new_core, result_of, submit

DEFAULTS = WorkerOptions("", "both", "", "", ())
BLOCK = DEFAULT
FULL, STATE = FullAttentionSpec(BLOCK, 1, 8, 4), LinearStateSpec(BLOCK, 4000)
WINDOW = SlidingWindowSpec(BLOCK, 1, 8, 4, 40)
LAYOUTS: dict[str, list[Spec]] = {
    "states, full": [STATE, STATE, FULL],
    "states alone": [STATE],
    "states, window, full": [STATE, WINDOW, FULL],
}
COMMON = prompt(1000, seed=99)
Prompt = tuple[int, ...]


def new_worker(specs: list[Spec]) -> WorkerCore:
    """With the default settings, but memory for everything."""
    return new_core(
        plan_layout(specs),
        12_000,
        DEFAULTS.max_step_tokens,
        DEFAULTS.max_sequences,
        steps_max=STEPS_MAX,
    )


@pytest.fixture(params=LAYOUTS)
def core(request: pytest.FixtureRequest) -> WorkerCore:
    return new_worker(LAYOUTS[request.param])


class Served:
    """Prompts served at once: what was found of each, and where their chunks ended."""

    def __init__(
        self, core: WorkerCore, prompts: Mapping[str, Prompt], max_tokens: int = 1
    ) -> None:
        self.hits: dict[str, int] = {}
        self.ends: dict[str, list[int]] = defaultdict(list)
        self.num_steps = 0
        for name, tokens in prompts.items():
            submit(core, RequestKey(name, 1), tokens, max_tokens)
        launched: deque[Step] = deque()
        rng = random.Random(0)
        while core.sequences:
            while (step := core.next_step(0)[0]) is not None:
                launched.append(step)
            step = launched.popleft()
            self.num_steps += 1
            for part in step.slices:
                self.ends[part.key.request_id].append(part.start + len(part.token_ids))
            for action in core.on_step_done(0, result_of(step, rng, fails=False)):
                if isinstance(action, ToRouter) and isinstance(action.message, PrefillReport):
                    self.hits[action.message.key.request_id] = action.message.hit_tokens
        core.kv.check()


def last_end(tokens: Prompt) -> int:
    """The last block end before the last token."""
    return (len(tokens) - 1) // BLOCK * BLOCK


def mixed_load(seed: int) -> dict[str, Prompt]:
    """Sequences that soon decode beside prompts of several steps: no budget ends a block."""
    rng = random.Random(seed)
    short = {f"short {n}": prompt(rng.randint(1, 40), seed=n) for n in range(13)}
    return short | {f"long {n}": prompt(rng.randint(300, 1800), seed=n + 50) for n in range(4)}


@pytest.mark.parametrize("seed", range(3))
def test_under_mixed_load_every_prompt_is_found_again_whole(core: WorkerCore, seed: int) -> None:
    asked = mixed_load(seed)
    first = Served(core, asked, max_tokens=30)
    for name, tokens in asked.items():
        ends = [0, *(end for end in first.ends[name] if end <= len(tokens))]
        assert ends[-1] == len(tokens)
        assert last_end(tokens) in ends
        # A chunk that reaches a block end goes no further than the last one within its share.
        assert all(b % BLOCK == 0 for a, b in pairwise(ends) if a // BLOCK < b // BLOCK), ends
    again = Served(core, asked)
    assert again.hits == {name: last_end(tokens) for name, tokens in asked.items()}
    longer = {name: tokens + prompt(100, seed=7) for name, tokens in asked.items()}
    found = Served(core, longer).hits
    for name, tokens in asked.items():
        assert found[name] >= last_end(tokens)


def test_a_common_prefix_is_kept_where_the_second_prompt_leaves_it() -> None:
    core = new_worker(LAYOUTS["states, full"])
    one, two, three = (COMMON + prompt(300, seed=n) for n in range(3))
    assert Served(core, {"one": one}).ends["one"] == [512, 1024, 1296, 1300]
    second = Served(core, {"two": two})
    assert second.hits["two"] == 512
    assert second.ends["two"] == [992, 1296, 1300]
    third = Served(core, {"three": three})
    assert third.hits["three"] == 992  # every full block of the common prefix
    assert third.ends["three"] == [1296, 1300]


def test_control_where_chunks_end_anywhere_nothing_is_found(
    core: WorkerCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chunking, "chunk_end", lambda *_: None)
    asked = mixed_load(0)
    Served(core, asked, max_tokens=30)
    found = Served(core, asked).hits
    assert sum(found.values()) < sum(map(last_end, asked.values())) / 4


def test_models_without_states_have_no_step_more() -> None:
    core = new_worker([WINDOW, FULL])
    assert Served(core, {"one": prompt(700)}).ends["one"] == [512, 700]


def test_blocks_larger_than_a_step_are_reached_in_parts() -> None:
    """As where a kernel needs a layer's state whole within one block."""
    size = 528
    core = new_worker([LinearStateSpec(size, 4000), FullAttentionSpec(size, 1, 8, 4)])
    tokens = prompt(1200)
    assert Served(core, {"one": tokens}).ends["one"] == [512, 528, 1040, 1056, 1200]
    assert Served(core, {"one": tokens}).hits["one"] == 1056


def share_found(monkeypatch: pytest.MonkeyPatch, *, all_kept: bool) -> float:
    """Of prompts that begin alike, while others decode in a pool of 1.2 times what those hold."""
    if all_kept:
        monkeypatch.setattr(LinearStateManager, "_is_kept", lambda *_: True)
    num_blocks = 1_200
    layout = plan_layout([LinearStateSpec(BLOCK, 16 * FULL.page_bytes), FULL])
    assert layout.groups[0].blocks_per_state == 16
    core = new_core(layout, num_blocks, DEFAULTS.max_step_tokens, 8, steps_max=STEPS_MAX)
    hits = asked = 0
    for turn in range(4):
        prompts = {f"{turn} {n}": COMMON + prompt(90, seed=8 * turn + n) for n in range(8)}
        served = Served(core, prompts, max_tokens=200)
        if turn:
            hits += sum(served.hits.values())
            asked += sum(map(len, prompts.values()))
    return hits / asked


def test_decoding_does_not_displace_what_prompts_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert share_found(monkeypatch, all_kept=False) > 0.8
    assert share_found(monkeypatch, all_kept=True) < 0.1  # control
