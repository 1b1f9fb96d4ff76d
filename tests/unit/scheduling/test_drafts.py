"""What is drafted, and what of it counts: drafts decide when tokens come, never which."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.outputs import FinishReason, StepOutputs
from disagg.messages.sampling import SampledToken, SamplingParams
from disagg.messages.session import EndReason
from disagg.messages.submit import PeerAddress, Role, Submit
from disagg.scheduling import ngrams, step_side
from disagg.scheduling.actions import ToRouter
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.drafts import accepted, rows_of, waits_to_draft
from disagg.scheduling.engine_steps import EngineSteps
from disagg.scheduling.ngrams import NgramIndex
from disagg.scheduling.step import PLACEHOLDER, SequenceSlice, Step, StepResult
from tests.unit.scheduling.failure_worlds import LAYOUTS
from tests.unit.scheduling.test_block_tables import new_core
from tests.unit.scheduling.test_steps_in_flight import KEY, LAYOUT, Walk

DRAFTS = 3


# -- the look-up ------------------------------------------------------------------------------


def looked_up(tokens: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """Brute force: the last place where the last three tokens, or two, stood before."""
    for size in (3, 2):
        for end in range(len(tokens) - 1, size - 1, -1):
            if len(tokens) >= size and tokens[end - size : end] == tokens[-size:]:
                found = list(tokens)
                for at in range(end, end + num_tokens):
                    found.append(found[at])
                return tuple(found[len(tokens) :])
    return ()


@pytest.mark.parametrize("vocab_size", [2, 5, 40])
def test_what_followed_the_last_tokens_before_is_drafted(vocab_size: int) -> None:
    rng, index, tokens, found = random.Random(vocab_size), NgramIndex(), [], 0
    for _ in range(300):
        tokens += rng.choices(range(vocab_size), k=rng.randint(1, 4))
        num_tokens = rng.randint(1, 9)
        draft = index.draft(tokens, num_tokens)
        assert draft == looked_up(tokens, num_tokens)
        found += bool(draft)
    assert found > 0


def test_a_repetition_goes_on() -> None:
    assert NgramIndex().draft([9, 1, 2, 1, 2], 5) == (1, 2, 1, 2, 1)
    assert NgramIndex().draft([7, 7, 7], 4) == (7, 7, 7, 7)


@pytest.mark.parametrize("tokens", [[], [1], [1, 1], [1, 2, 3, 4, 1]])
def test_what_stood_nowhere_before_drafts_nothing(tokens: list[int]) -> None:
    assert NgramIndex().draft(tokens, 4) == ()


def test_a_look_up_takes_in_a_bounded_part_of_a_long_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ngrams, "NEW_TOKENS_MAX", 100)
    index, tokens = NgramIndex(), [*range(1_000), 951, 952]
    drafts = [index.draft(tokens, 2) for _ in range(11)]
    assert drafts == [()] * 9 + [(953, 954)] * 2


# -- what counts ------------------------------------------------------------------------------


def drafted(*token_ids: int, num_drafts: int) -> SequenceSlice:
    return SequenceSlice(KEY, token_ids, 5, False, (), SamplingParams(9), num_drafts=num_drafts)


@pytest.mark.parametrize(
    ("sampled", "num_accepted"),
    [((2, 3, 4), 3), ((2, 3, 9), 3), ((2, 9, 4), 2), ((9, 3, 4), 1), ((9, 2, 3), 1)],
)
def test_a_token_counts_if_all_drafts_before_it_are_right(
    sampled: tuple[int, ...], num_accepted: int
) -> None:
    first, *after = (SampledToken(token) for token in sampled)
    tokens = accepted(drafted(1, 2, 3, num_drafts=2), first, tuple(after))
    assert tuple(one.token_id for one in tokens) == sampled[:num_accepted]


def test_every_row_is_sampled_at_its_position() -> None:
    rows = rows_of(drafted(1, 2, 3, num_drafts=2))
    assert [(row.start + len(row.token_ids), row.token_ids) for row in rows] == [
        (6, (1,)),
        (7, (1, 2)),
        (8, (1, 2, 3)),
    ]
    chunk = drafted(1, 2, 3, num_drafts=0)
    assert rows_of(chunk) == [chunk]


def test_an_engine_refuses_a_placeholder_behind_drafts() -> None:
    def compute(_: None, step: Step) -> list[SampledToken | tuple[SampledToken, ...]]:
        return [(SampledToken(2), SampledToken(3)) for _ in step.slices]

    steps = EngineSteps(lambda _: None, compute)
    result = steps.run(Step(0, (drafted(1, 2, num_drafts=1),)))
    assert (result.samples, result.after_drafts) == ((SampledToken(2),), ((SampledToken(3),),))
    behind = SequenceSlice(KEY, (PLACEHOLDER,), 7, False, (), SamplingParams(9))
    assert "no token was sampled" in steps.run(Step(1, (behind,))).error


# -- a worker ---------------------------------------------------------------------------------

PROMPT = (1, 2, 3, 4, 1, 2)


def core_with(
    prompt: Sequence[int] = PROMPT,
    num_drafts: int = DRAFTS,
    num_blocks: int = 24,
    steps_max: int = 2,
    role: Role = Role.LOCAL,
    **sampling: Any,
) -> WorkerCore:
    core = new_core(
        LAYOUT, num_blocks, max_step_tokens=16, steps_max=steps_max, num_drafts=num_drafts
    )
    ask(core, KEY, prompt, role, **sampling)
    return core


def ask(
    core: WorkerCore,
    key: RequestKey,
    prompt: Sequence[int],
    role: Role = Role.LOCAL,
    **sampling: Any,
) -> None:
    params = SamplingParams(**({"max_tokens": 20, "num_prompt_tokens": len(prompt)} | sampling))
    peer = None if role is Role.LOCAL else PeerAddress(Incarnation("d", "1"), "there:1")
    core.on_router_message(0, Submit(key, role, tuple(prompt), (), b"", params, peer))


def launch(core: WorkerCore) -> Step:
    step, _ = core.next_step(0)
    assert step is not None
    return step


def end(core: WorkerCore, step: Step, **sampled: tuple[int, ...]) -> list[tuple[int, ...]]:
    """What reaches the router of a step that sampled so, by request."""
    tokens = [
        tuple(map(SampledToken, sampled[part.key.request_id])) if part.sampling else (None,)
        for part in step.slices
    ]
    first = tuple(one[0] for one in tokens)
    result = StepResult(step.step_id, first, after_drafts=tuple(one[1:] for one in tokens))
    actions = core.on_step_done(0, result)
    return [
        output.token_ids
        for action in actions
        if isinstance(action, ToRouter) and isinstance(action.message, StepOutputs)
        for output in action.message.outputs
    ]


def drafting_step(core: WorkerCore, token: int = 3) -> Step:
    """The first step that drafts, once the first token is known."""
    assert end(core, launch(core), r=(token,)) == [(token,)]
    return launch(core)


def test_right_drafts_come_at_once_and_their_blocks_are_published() -> None:
    core = core_with()
    step = drafting_step(core)
    (part,) = step.slices
    assert (part.token_ids, part.start, part.num_drafts) == ((3, 4, 1, 2), 6, 3)
    assert core.next_step(0) == (None, []), "where it goes on is not known"
    assert end(core, step, r=(4, 1, 9, 5)) == [(4, 1, 9)]
    counts = core.counters.counts
    assert (counts["draft_tokens"], counts["accepted_draft_tokens"]) == (3, 2)
    assert len(core.kv.pool.cache.index(0)) == 2, "blocks of four of the nine tokens computed"
    (part,) = launch(core).slices
    assert (part.token_ids[0], part.start) == (9, 9)


def test_without_the_setting_the_next_step_has_a_placeholder() -> None:
    core = core_with(num_drafts=0)
    assert [launch(core).slices[0].token_ids, launch(core).slices[0].token_ids] == [
        PROMPT,
        (PLACEHOLDER,),
    ]


def test_whose_tokens_say_nothing_goes_on_with_a_placeholder() -> None:
    core = core_with((1, 2, 3, 4))
    launch(core)
    (part,) = launch(core).slices
    assert part.token_ids == (PLACEHOLDER,)
    assert part.num_drafts == 0


def test_while_one_drafts_others_go_on() -> None:
    core = core_with()
    other = RequestKey("other", 1)
    ask(core, other, (5, 6, 7))
    first = launch(core)
    second = launch(core)
    assert [part.key for part in second.slices] == [other], "the first waits for its token"
    end(core, first, r=(3,), other=(8,))
    third = launch(core)
    assert {part.key: part.num_drafts for part in third.slices} == {KEY: 3, other: 0}
    end(core, second, other=(9,))
    fourth = launch(core)
    assert [part.key for part in fourth.slices] == [other]


@pytest.mark.parametrize(("stop", "received"), [(4, (4,)), (1, (4, 1)), (8, (4, 1, 2, 8))])
def test_it_stops_inside_its_drafts_as_without(stop: int, received: tuple[int, ...]) -> None:
    core = core_with(stop_token_ids=(stop,))
    assert end(core, drafting_step(core), r=(4, 1, 2, 8)) == [received]
    assert not core.sequences
    assert len(core.kv.pool.cache.index(0)) == (6 + len(received)) // 4
    assert core.kv.num_free_blocks == core.kv.num_usable_blocks
    core.kv.check()


@pytest.mark.parametrize(("max_tokens", "num_drafts"), [(2, 0), (3, 1), (4, 2), (5, 3), (6, 3)])
def test_nothing_is_drafted_past_the_length(max_tokens: int, num_drafts: int) -> None:
    core = core_with(max_tokens=max_tokens)
    first = launch(core)
    assert waits_to_draft(core.sequences[KEY]) == (num_drafts > 0)
    if not num_drafts:
        assert launch(core).slices[0].token_ids == (PLACEHOLDER,)
        return
    end(core, first, r=(3,))
    step = launch(core)
    assert step.slices[0].num_drafts == num_drafts
    assert end(core, step, r=(4, 1, 2, 3)[: num_drafts + 1]) == [(4, 1, 2, 3)[: num_drafts + 1]]
    assert bool(core.sequences) == (max_tokens == 6)


@pytest.mark.parametrize(
    "sampling",
    [{"presence_penalty": 0.5}, {"repetition_penalty": 1.1}, {"grammar": "{}"}],
)
def test_who_looks_back_drafts_nothing(sampling: dict[str, Any]) -> None:
    core = core_with(**sampling)
    launch(core)
    (part,) = launch(core).slices
    assert (part.token_ids, part.num_drafts) == ((PLACEHOLDER,), 0)


def test_nothing_is_drafted_beside_a_prompts_chunk() -> None:
    core = core_with(steps_max=1)
    step = launch(core)
    ask(core, RequestKey("long", 1), range(50, 90))
    end(core, step, r=(3,))
    num_drafts: list[int] = []
    while any(seq.num_unscheduled > 1 for seq in core.batcher.running) or not num_drafts:
        step = launch(core)
        num_drafts += [part.num_drafts for part in step.slices]
        end(core, step, r=(0,), long=(0,))
    assert set(num_drafts) == {0}


def test_wrong_drafts_are_followed_by_as_many_tokens_without() -> None:
    core = core_with(steps_max=1)
    step, num_drafts = drafting_step(core), []
    for token in (3, 4, 1, 2, 3, 4):
        num_drafts.append(step.slices[0].num_drafts)
        end(core, step, r=(token, *(0,) * step.slices[0].num_drafts))
        step = launch(core)
    assert num_drafts == [3, 0, 0, 0, 3, 0]


@pytest.mark.parametrize(("scarce", "num_drafts"), [(False, [3, 3]), (True, [3, 1])])
def test_lacking_slots_it_goes_without_drafts_and_nobody_is_preempted(
    scarce: bool, num_drafts: list[int]
) -> None:
    """Three blocks of four have room for the first drafts, and for one of the second ones."""
    core = core_with(steps_max=1)
    end(core, launch(core), r=(3,))
    if scarce:
        core.kv.pool.allocate(core.kv.num_available_blocks)
    for number in num_drafts:
        (part,) = launch(core).slices
        assert part.num_drafts == number
        step, _ = core.batcher._in_flight[0]
        assert end(core, step, r=(4, 1, 2, 3)[: number + 1])
    assert core.batcher.num_preemptions == 0
    assert core.kv.tables.num_held(KEY) == ((3,) if scarce else (4,))


@pytest.mark.parametrize("steps_max", [1, 2, 3])
def test_every_token_comes_once_and_is_right(steps_max: int) -> None:
    """Clients come and go, memory is short, steps fail; stop tokens lie among the drafts."""
    seen: Counter[str] = Counter()
    for name in sorted(name for name in LAYOUTS if "state" not in name):
        walk = Walk(name, 0, steps_max, num_drafts=DRAFTS)
        walk.run()
        seen += walk.seen + Counter(walk.core.counters.counts)
        seen["preempted"] += walk.core.batcher.num_preemptions
    for what in (
        *(FinishReason.STOP, FinishReason.LENGTH, EndReason.STEP_FAILED, "preempted"),
        *("draft_tokens", "accepted_draft_tokens"),
    ):
        assert seen[what] > 0, what
    assert seen["accepted_draft_tokens"] < seen["draft_tokens"]


def test_control_one_draft_too_many_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_more(
        part: SequenceSlice, first: SampledToken, after: tuple[SampledToken, ...]
    ) -> tuple[SampledToken, ...]:
        return (first, *after)[: len(accepted(part, first, after)) + 1]

    Walk("full", 0, 2, num_drafts=DRAFTS).run()
    monkeypatch.setattr(step_side, "accepted", one_more)
    with pytest.raises(AssertionError):
        Walk("full", 0, 2, num_drafts=DRAFTS).run()
