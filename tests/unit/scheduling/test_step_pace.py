"""The step after the running one is planned when that one has nearly ended."""

from disagg.messages.identity import RequestKey
from disagg.scheduling.step import SequenceSlice, Step
from disagg.scheduling.step_pace import PLANNED_AT, StepPace


def step(num_tokens: int) -> Step:
    part = SequenceSlice(RequestKey("a", 0), (1,) * num_tokens, 0, False, ())
    return Step(0, (part,), ())


def after_one_step(took_ms: float, num_tokens: int = 4) -> StepPace:
    """A pace that has seen a step, with the next one running since 100 ms."""
    pace = StepPace()
    pace.launched(100 - took_ms, step(num_tokens))
    pace.done(100)
    pace.launched(100, step(num_tokens))
    return pace


def test_the_next_step_is_planned_late_in_the_running_one() -> None:
    pace = after_one_step(20)
    assert pace.wait_ms(100) == 20 * PLANNED_AT
    assert pace.wait_ms(110) == 20 * PLANNED_AT - 10
    assert pace.wait_ms(100 + 20 * PLANNED_AT) == 0


def test_nothing_waits_without_a_step_that_runs() -> None:
    pace = after_one_step(20)
    assert pace.wait_ms(100) > 0
    pace.done(101)
    assert pace.wait_ms(101) == 0
    assert StepPace().wait_ms(0) == 0


def test_a_size_that_was_never_seen_is_planned_for_at_once() -> None:
    pace = after_one_step(20, num_tokens=4)
    pace.done(120)
    pace.launched(120, step(400))
    assert pace.wait_ms(120) == 0


def test_sizes_are_told_apart() -> None:
    pace = after_one_step(20, num_tokens=4)
    pace.done(120)
    pace.launched(120, step(400))
    pace.done(1_120)
    pace.launched(1_120, step(5))
    assert pace.wait_ms(1_120) == 20 * PLANNED_AT, "about as large as the one of 4 tokens"
    pace.done(1_140)
    pace.launched(1_140, step(300))
    assert pace.wait_ms(1_140) == 1_000 * PLANNED_AT


def test_a_step_begins_when_the_one_before_it_ends() -> None:
    pace = after_one_step(20)
    pace.launched(115, step(4))  # the second in flight
    assert pace.wait_ms(115) == 0, "how many may be in flight is the batcher's business"
    pace.done(130)
    assert pace.wait_ms(130) == 30 * PLANNED_AT, "the last one took 30 ms; this one began at 130"
