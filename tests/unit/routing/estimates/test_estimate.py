"""Estimates of plans, by hand and by properties that hold for all numbers."""

import math
from dataclasses import astuple, fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.routing.estimates.answers import Answer
from disagg.routing.estimates.estimate import Estimate, Move, Work, estimate
from disagg.routing.estimates.place import LinkCost, LongPrompts, Place, StepCost
from disagg.routing.slo import missed

COST = StepCost(10, 0.1, 0, 1, 0)
IDLE = Place(COST, 0, 0, 0, 0, 0, 8, 0)
LINK = LinkCost(2, 5)
MIB = 1 << 20


def busy(num_running: int, **changes: float) -> Place:
    place = replace(IDLE, num_running=num_running, num_requests=num_running, context_tokens=100)
    return replace(place, **changes)  # type: ignore[arg-type]


def test_an_idle_worker_computes_the_rest_of_the_prompt() -> None:
    found = estimate(Work(300, 100, 64), IDLE, IDLE)
    assert (found.queue_ms, found.transfer_ms, found.handover_ms) == (0, 0, 0)
    assert found.prefill_ms == found.ttft_ms == 10 + 0.1 * 200
    assert found.tpot_ms == 11
    assert (found.others_ms, found.num_made_late, found.num_bytes) == (0, 0, 0)
    assert found.own_ms == 30 + 64 * 11


def test_a_prompt_in_chunks_pays_every_step() -> None:
    place = replace(IDLE, step_tokens_max=64)
    assert estimate(Work(200, 0, 64), place, place).prefill_ms == 4 * 10 + 20


def test_context_before_a_token_costs_what_was_fitted() -> None:
    place = replace(IDLE, cost=replace(COST, context_token_ms=1))
    fresh = estimate(Work(1024, 0, 1), place, place).prefill_ms
    assert fresh == 10 + 102.4 + 1024 * 512 / 1024
    appended = estimate(Work(2048, 1024, 1), place, place).prefill_ms
    assert appended == 10 + 102.4 + 1024 * 1536 / 1024


def test_the_queue_before_it_is_waited_for() -> None:
    place = replace(IDLE, num_queued_tokens=500, num_queued=2)
    assert estimate(Work(100, 0, 1), place, IDLE).queue_ms == 50 + 10
    assert estimate(Work(100, 0, 1), busy(4), IDLE).queue_ms == 14 / 2, "the step that runs"


def test_those_at_the_router_wait_as_long_as_it_does() -> None:
    place = replace(IDLE, num_queued_tokens=500, num_queued=2)
    alone = estimate(Work(100, 0, 1), place, IDLE)
    before_others = estimate(Work(100, 0, 1, num_behind=3), place, IDLE)
    assert before_others.others_ms == alone.others_ms + 3 * alone.queue_ms
    assert before_others.own_ms == alone.own_ms
    assert not estimate(Work(100, 0, 1, num_behind=3), IDLE, IDLE).others_ms, "nobody waits"


def test_half_of_what_would_be_found_is_computed_again_once_it_is_pushed_out() -> None:
    work = Work(300, 100, 1, num_held=100, found_share=0.5)
    alone = estimate(work, IDLE, IDLE)
    assert alone.others_ms == pytest.approx(0.5 / 2 * 200 * 0.1), "its own new tokens"
    assert estimate(replace(work, found_share=0.0), IDLE, IDLE).others_ms == 0
    pulled = replace(work, pull=Move(MIB, MIB, LINK), num_held=0)
    assert estimate(pulled, IDLE, IDLE).others_ms == pytest.approx(0.5 / 2 * 300 * 0.1)
    handed = replace(work, handover=Move(MIB, MIB, LINK), handed_tokens=250)
    assert estimate(handed, IDLE, IDLE).others_ms == pytest.approx(0.5 / 2 * (200 + 250) * 0.1)


def test_what_is_computed_again_holds_up_those_who_decode_there() -> None:
    work = Work(300, 100, 1, handover=Move(0, 0, LINK), num_held=100, handed_tokens=250)
    for prefill, decode, num_more in ((IDLE, IDLE, 0), (busy(2), IDLE, 400), (IDLE, busy(2), 500)):
        nothing = estimate(work, prefill, decode).others_ms
        found = estimate(replace(work, found_share=0.5), prefill, decode).others_ms
        assert found - nothing == pytest.approx(0.5 / 2 * (200 + 250 + num_more) * 0.1)


def test_shorter_ones_that_come_wait_only_while_no_worker_is_free() -> None:
    """100 ms of prefill: who comes in the meantime waits for what is left of it, in half steps."""
    work = Work(900, 0, 1, newcomers_per_ms=0.01)
    queued = replace(IDLE, num_queued_tokens=900, num_queued=1)
    for place, others_free_ms, waited_ms2 in (
        (IDLE, 0, 0),
        (IDLE, 40, 40**2),
        (IDLE, 500, 100**2),
        (queued, 0, 0),
        (queued, 40, 0),
        (queued, 500, 200**2 - 100**2),
        (queued, math.inf, 200**2 - 100**2),
    ):
        found = estimate(replace(work, others_free_ms=others_free_ms), place, place)
        none = estimate(replace(work, newcomers_per_ms=0.0), place, place)
        assert found.others_ms - none.others_ms == pytest.approx(0.01 * waited_ms2)
        half_busy = estimate(
            replace(work, others_free_ms=others_free_ms), *[replace(place, prompt_share=0.5)] * 2
        )
        assert half_busy.others_ms - none.others_ms == pytest.approx(2 * 0.01 * waited_ms2)


def test_a_short_prompt_overtakes_a_long_one_and_waits_for_short_ones() -> None:
    """Half of a step is the oldest's, the others take turns; the step that runs is half over."""
    long = replace(IDLE, step_tokens_max=512, num_queued_tokens=4_000, num_queued=1)
    assert long.tokens_before(200) == 256 + 256
    assert long.tokens_before(1_000) == 256 + 1_000
    assert long.tokens_before(10_000) == 4_000, "not more than there are"
    assert long.queue_ms(200) == 51.2 + 10
    many = replace(long, num_queued=20)
    assert many.tokens_before(200) == 4_000, "19 of 200 tokens have their turn first"
    unknown = replace(long, step_tokens_max=0)
    assert unknown.tokens_before(200) == 4_000, "control: nothing is known of its steps"
    found = estimate(Work(200, 0, 0), long, long)
    assert found.drain_ms == 400 + 4_000 / 512 * 10 > found.queue_ms


def test_who_decodes_beside_a_queue_waits_for_it_token_by_token() -> None:
    queued = replace(IDLE, step_tokens_max=512, num_queued_tokens=4_000, num_queued=1)
    calm = estimate(Work(200, 0, 64), IDLE, IDLE)
    beside = estimate(Work(200, 0, 64), queued, queued)
    left = 4_000 - 512
    assert beside.tpot_ms == pytest.approx(calm.tpot_ms + left * 0.1 / 64)
    few = estimate(Work(200, 0, 2), queued, queued)
    assert few.tpot_ms == pytest.approx(11 + 2 * 512 * 0.1 / 2), "no more than its steps have"
    handed = estimate(Work(4_000, 0, 64, handover=Move(0, 0, LINK)), IDLE, queued)
    assert handed.tpot_ms == calm.tpot_ms, "it is over when the prompt is computed elsewhere"


def test_prompts_that_lately_came_are_expected_again() -> None:
    often = replace(IDLE, prompt_share=0.5)
    assert estimate(Work(200, 0, 64), often, often).tpot_ms == 2 * 11
    assert estimate(Work(200, 0, 64, handover=Move(0, 0, LINK)), often, IDLE).tpot_ms == 11
    always = replace(IDLE, prompt_share=1.0)
    assert estimate(Work(200, 0, 64), always, always).tpot_ms == pytest.approx(110)


def test_long_prompts_stall_answers_and_short_ones_hardly() -> None:
    """A token takes 11 ms here, a prompt of 2,000 tokens 200 ms."""

    def stall_share(num_tokens: int, spread_tokens: float = 64) -> float:
        work = Work(num_tokens, 0, 64, spread_tokens=spread_tokens)
        return estimate(work, IDLE, IDLE).stall_share

    assert stall_share(20) == pytest.approx(2 / 64 / 11)
    assert stall_share(2_000) == pytest.approx(200 / 64 / 11)
    assert stall_share(20_000) == 1, "it takes longer than all tokens of an answer"
    assert stall_share(2_000, spread_tokens=32) == pytest.approx(2 * stall_share(2_000))


def test_who_comes_and_who_queues_is_held_up_too() -> None:
    coming = replace(IDLE, num_coming=2)
    assert estimate(Work(300, 100, 0), coming, coming).others_ms == pytest.approx(2 * 20 * 1.0)
    behind = replace(coming, num_queued_tokens=1_800, num_queued=2)
    found = estimate(Work(300, 100, 0), behind, behind).others_ms
    assert found == pytest.approx(20 * (2 * 200 / 2_000 + 2)), "most of them come later"
    short = replace(IDLE, num_queued_tokens=100, num_queued=2)
    assert estimate(Work(300, 100, 0), short, short).others_ms == pytest.approx(20 * 2 * 50 / 200)


def test_who_decodes_where_a_prompt_is_computed_is_held_up_by_it() -> None:
    place = busy(4)
    found = estimate(Work(300, 100, 64), place, place)
    assert found.others_ms == 4 * (20 + 64 * 1), "by its tokens, then by one sequence more"
    handed = estimate(Work(300, 100, 64, handover=Move(0, 0, LINK)), IDLE, place)
    assert handed.others_ms == 4 * 64


def test_answers_are_late_by_what_is_computed_meanwhile_and_by_one_sequence_more() -> None:
    place = busy(4)  # a step takes 14 ms, with one more 15

    def late(bound_ms: float, num_tokens: float = 64, handover: Move | None = None) -> float:
        work = Work(300, 100, 64, slo_tpot_ms=bound_ms, spread_tokens=num_tokens)
        prefill = place if handover is None else IDLE
        return estimate(replace(work, handover=handover), prefill, place).num_made_late

    def four(bound_ms: float, before_ms: float, after_ms: float) -> float:
        return 4 * missed(after_ms / bound_ms) * (1 - missed(before_ms / bound_ms))

    move = Move(0, 0, LINK)
    assert late(15) == pytest.approx(four(15, 14, 15 + 20 / 64)), "20 ms more for 64 tokens"
    assert late(15, num_tokens=20) == pytest.approx(four(15, 14, 15 + 20 / 20)), "the same for 20"
    assert late(15, handover=move) == pytest.approx(four(15, 14, 15)), "only one sequence more"
    assert (late(20), late(11)) == (0, 0), "in time all the same, late anyway"


def test_answers_known_one_by_one_are_late_by_their_own_bounds_and_lengths() -> None:
    bound_ms = 19.0  # a step takes 14 ms, with one more 15, the prompt 20
    short = Answer(num_tokens=0, num_left=2, took_ms=0, slo_tpot_ms=bound_ms)
    long = Answer(num_tokens=0, num_left=1_000, took_ms=0, slo_tpot_ms=bound_ms)
    nearly_done = Answer(num_tokens=99, num_left=1, took_ms=99 * 14, slo_tpot_ms=bound_ms)
    lost = Answer(num_tokens=10, num_left=10, took_ms=1_000, slo_tpot_ms=bound_ms)
    free = replace(short, slo_tpot_ms=0)
    work = Work(300, 100, 64)
    for one, num in ((short, 1), (long, 0), (nearly_done, 0), (lost, 0), (free, 0)):
        place = busy(4, answers=(one,))  # type: ignore[arg-type]
        assert estimate(work, place, place).num_made_late == num
    place = busy(4, answers=(long, free))  # type: ignore[arg-type]
    found = estimate(replace(work, slo_tpot_ms=bound_ms, spread_tokens=2), place, place)
    assert found.num_made_late == 3, "the bound of all for who has no own one, known or not"


def test_who_waits_for_its_prompt_has_no_pause_of_what_is_queued() -> None:
    queued = busy(0, num_queued_tokens=1_000, num_queued=1, num_coming=1)
    begun = Answer(0, 10, 0, slo_tpot_ms=15)
    for one, num in ((begun, 0), (replace(begun, has_begun=False), 1)):
        place = replace(queued, answers=(one,))
        found = estimate(Work(1_100, 0, 64), place, place)
        assert found.num_made_late == num, "the one that has begun is late by the queue"


def test_a_prompt_that_is_done_before_an_answer_begins_is_not_in_its_way() -> None:
    place = busy(0, num_coming=1)
    for begins_ms, num in ((0, 1), (60_000, 0)):
        answer = Answer(0, 1, 0, slo_tpot_ms=20, has_begun=False, begins_ms=begins_ms)
        there = replace(place, answers=(answer,))
        assert estimate(Work(300, 100, 64), there, there).num_made_late == num, begins_ms


def test_who_will_decode_by_then_counts_too() -> None:
    place = busy(4, num_coming=2)
    found = estimate(Work(300, 100, 64, slo_tpot_ms=20, spread_tokens=2), place, place)
    assert found.num_made_late == 6


def test_a_long_prompt_comes_during_an_answer_or_does_not() -> None:
    place = replace(IDLE, prompt_share=0.5, long_prompts=LongPrompts(0.4, 2_000))
    found = estimate(Work(300, 100, 50), place, place)
    calm_ms = 11 / (1 - 0.1)
    assert found.tpot_ms == 22, "on average"
    assert found.calm_tpot_ms == pytest.approx(calm_ms), "beside the short ones"
    assert found.stalled_tpot_ms == pytest.approx(calm_ms + 2_000 / 50)
    assert found.stall_chance == pytest.approx(1 - math.exp(-0.4 * 50 * calm_ms / 2_000))
    assert found.tpot_missed(30) == found.stall_chance, "in time if none comes"
    assert (found.tpot_missed(100), found.tpot_missed(8)) == (0, 1)
    even = replace(place, long_prompts=LongPrompts(0.4, 0))
    assert not estimate(Work(300, 100, 50), even, even).stall_chance, "nobody knows of any"


def test_a_long_prompt_that_waits_to_go_there_comes() -> None:
    for known, waiting_ms, stall_ms in (
        (LongPrompts(), 900, 900),
        (LongPrompts(0.4, 2_000), 900, 2_000),
        (LongPrompts(0.4, 2_000), 5_000, 5_000),
    ):
        waits = replace(known, waiting_chance=1.0, waiting_ms=waiting_ms)
        place = replace(IDLE, long_prompts=waits)
        found = estimate(Work(300, 100, 50), place, place)
        assert found.stall_chance == 1
        assert found.stalled_tpot_ms == pytest.approx(found.calm_tpot_ms + stall_ms / 50)
    half = replace(IDLE, long_prompts=replace(known, waiting_chance=0.5))
    alone = replace(IDLE, long_prompts=known)
    chances = [estimate(Work(300, 100, 50), one, one).stall_chance for one in (half, alone)]
    assert chances[0] == pytest.approx(0.5 + chances[1] / 2), "it or one of those to come"


def test_a_hand_over_pays_its_reservation_before_and_its_bytes_after_the_first_token() -> None:
    move = Move(20 * MIB, 4 * MIB, LINK)
    work = Work(200, 0, 64, handover=move, reserve_ms=3, commit_ms=1, message_ms=2)
    found = estimate(work, IDLE, IDLE)
    assert found.ttft_ms == 3 + 30 + 2
    assert found.handover_ms == (82 - 30) + 22 + 1, "the prefill hides 30 ms of reading 16 MiB"
    assert found.num_bytes == 20 * MIB
    short = estimate(replace(work, handover=Move(4 * MIB, 4 * MIB, LINK)), IDLE, IDLE)
    assert short.handover_ms == 22 + 1


def test_a_pull_and_a_tier_are_read_first() -> None:
    work = Work(200, 150, 64, load_ms=7, pull=Move(MIB, 0, LINK))
    assert estimate(work, IDLE, IDLE).transfer_ms == 7 + 7
    assert estimate(replace(work, pull_ms=5), IDLE, IDLE).transfer_ms == 7 + 7 + 5
    assert estimate(Work(200, 150, 64, pull_ms=5), IDLE, IDLE).transfer_ms == 0, "nothing is pulled"
    assert estimate(work, IDLE, IDLE).num_bytes == MIB


def test_a_full_worker_is_waited_for_by_turns() -> None:
    full = busy(8)
    assert estimate(Work(100, 0, 64), full, full).queue_ms == 18 / 2 + 64 * 18 / 8
    assert estimate(Work(100, 0, 64), busy(7), busy(7)).queue_ms == 17 / 2


MS = st.floats(0, 1e6)
COUNT = st.integers(0, 1 << 20)
COSTS = st.builds(StepCost, *[st.floats(0, 1e3)] * 5)
LINKS = st.builds(LinkCost, MS, MS)
ANSWERS = st.builds(Answer, COUNT, st.floats(1, 64), MS, MS, st.booleans())
PLACES = st.builds(
    Place,
    COSTS,
    COUNT,
    MS,
    COUNT,
    COUNT,
    COUNT,
    COUNT,
    COUNT,
    COUNT,
    st.floats(0, 1),
    st.lists(ANSWERS, max_size=3).map(tuple),
    st.builds(LongPrompts, st.floats(0, 1), MS),
    num_blocks_used=COUNT,
    num_blocks_free=COUNT,
    num_holding=COUNT,
    num_waiting=COUNT,
)
MOVES = st.builds(lambda late, early, link: Move(late + early, late, link), COUNT, COUNT, LINKS)
WORKS = st.builds(
    lambda found, more, answer, load, pull, handover, reserve, message, commit, *rest: Work(
        found + more, found, answer, load, pull, handover, reserve, message, commit, 64, 3, *rest
    ),
    COUNT,
    st.integers(1, 1 << 20),
    st.integers(0, 64),
    MS,
    st.none() | MOVES,
    st.none() | MOVES,
    MS,
    MS,
    MS,
    st.just(0),
    st.floats(0, 1),
    st.floats(0, 1),
    MS | st.just(math.inf),
    MS,
    MS,
    MS,
    COUNT,
    COUNT,
    COUNT,
)


@settings(deadline=None)
@given(WORKS, PLACES, PLACES)
def test_nothing_is_negative_or_no_number(work: Work, prefill: Place, decode: Place) -> None:
    found = estimate(work, prefill, decode if work.handover else prefill)
    figures = [*astuple(found), found.tpot_missed(30)]
    assert found.stall_share <= 1
    assert found.stall_chance <= 1
    for figure in (*figures, found.ttft_ms, found.mean_tpot_ms, found.cost_ms(3.0)):
        assert math.isfinite(figure)
        assert figure >= 0


def worse(work: Work, place: Place) -> list[tuple[Work, Place]]:
    return [
        (replace(work, num_tokens=work.num_tokens + 100), place),
        (replace(work, message_ms=work.message_ms + 1), place),
        (replace(work, load_ms=work.load_ms + 1), place),
        (work, replace(place, num_queued_tokens=place.num_queued_tokens * 2 + 100)),
        (work, replace(place, num_requests=place.num_requests + 5)),
        (work, replace(place, num_waiting=place.num_waiting + 1)),
        (replace(work, num_blocks=work.num_blocks + 9), place),
        (work, replace(place, cost=replace(place.cost, token_ms=place.cost.token_ms + 1))),
        (work, replace(place, cost=replace(place.cost, step_ms=place.cost.step_ms + 1))),
    ]


@settings(deadline=None)
@given(WORKS, PLACES)
def test_more_to_do_never_takes_less(work: Work, place: Place) -> None:
    base = estimate(work, place, place)
    for more, slower in worse(work, place):
        found = estimate(more, slower, slower)
        for what in ("ttft_ms", "own_ms"):
            before, after = getattr(base, what), getattr(found, what)
            assert after >= before * (1 - 1e-9) - 1e-6, (what, more, slower)


@settings(deadline=None)
@given(WORKS, PLACES)
def test_who_disturbs_more_costs_others_more(work: Work, place: Place) -> None:
    crowded = replace(place, num_running=place.num_running + 10)
    # Newcomers apart: who has much to do already is no free worker that they lose.
    work = replace(work, newcomers_per_ms=0.0)
    assert estimate(work, crowded, crowded).others_ms >= estimate(work, place, place).others_ms


@pytest.mark.parametrize("name", [field.name for field in fields(Estimate)])
def test_every_figure_is_one_that_something_changes(name: str) -> None:
    """Negative control of the properties: none of the figures is a constant."""
    quiet = estimate(Work(100, 0, 0), IDLE, IDLE)
    work = Work(200, 0, 64, 1, Move(MIB, MIB, LINK), Move(MIB, MIB, LINK), 1, 1, 1)
    work = replace(work, slo_tpot_ms=20)
    slow = busy(9, num_queued_tokens=100, num_queued=1)
    slow = replace(slow, long_prompts=LongPrompts(0.5, 100))
    assert getattr(quiet, name) != getattr(estimate(work, slow, slow), name)
