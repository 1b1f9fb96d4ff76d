"""What is prepared while other steps run, and what becomes of it when one of those fails."""

import random
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from disagg.errors import InvariantViolation
from disagg.messages.identity import RequestKey
from disagg.messages.sampling import SampledToken, SamplingParams
from disagg.scheduling import engine_steps
from disagg.scheduling.engine_steps import EngineSteps, Failed, SliceSamples
from disagg.scheduling.step import PLACEHOLDER, SequenceSlice, Step, StepResult

BOUND_S = 60.0
SAMPLING = SamplingParams(max_tokens=9)


class CannotError(Exception):
    """A step that is laid out or computed fails."""


class Engine:
    """Its tokens are functions of sequence, position and the token before."""

    def __init__(self) -> None:
        self.steps: EngineSteps[list[str]] = EngineSteps(self.lay_out, self.compute, (CannotError,))
        self.bad_layouts: set[int] = set()
        self.bad_steps: set[int] = set()
        self.bad_slices: set[tuple[int, str]] = set()
        self.laid_out: list[tuple[int, list[str], list[str]]] = []
        self.computed: list[tuple[int, list[str], list[str]]] = []
        self.hold: Callable[[int], None] = lambda _: None

    def lay_out(self, step: Step) -> list[str]:
        names = [part.key.request_id for part in step.slices]
        self.laid_out.append((step.step_id, names, [key.request_id for key in step.ended]))
        if step.step_id in self.bad_layouts:
            raise CannotError
        return names

    def compute(self, laid_out: list[str], step: Step) -> list[SliceSamples]:
        self.hold(step.step_id)
        names = [part.key.request_id for part in step.slices]
        assert set(names) <= set(laid_out)
        self.computed.append((step.step_id, names, [key.request_id for key in step.ended]))
        assert not any(PLACEHOLDER in part.token_ids for part in step.slices)
        if step.step_id in self.bad_steps:
            raise CannotError
        return [
            Failed("bad") if (step.step_id, name) in self.bad_slices else self.sample(part)
            for name, part in zip(names, step.slices, strict=True)
        ]

    @staticmethod
    def sample(part: SequenceSlice) -> SampledToken | None:
        if part.sampling is None:
            return None
        return SampledToken(hash((part.key.request_id, part.start, *part.token_ids)) % 1_000)

    def prepare(self, *steps: Step) -> None:
        for step in steps:
            self.steps.prepare(step)

    def tokens(self, step: Step) -> list[bool]:
        """Whether each slice has a sample; the step must not fail."""
        result = self.steps.run(step)
        assert result.error == ""
        return [one is not None for one in result.samples]


def first(name: str) -> SequenceSlice:
    return SequenceSlice(RequestKey(name, 1), (1, 2), 0, True, (), SAMPLING)


def later(name: str, start: int = 2) -> SequenceSlice:
    return SequenceSlice(RequestKey(name, 1), (PLACEHOLDER,), start, False, (), SAMPLING)


def step_of(step_id: int, *slices: SequenceSlice, ended: str = "") -> Step:
    return Step(step_id, slices, tuple(RequestKey(name, 1) for name in ended))


def test_a_step_is_prepared_while_the_one_before_it_is_computed() -> None:
    engine, began, go = Engine(), threading.Event(), threading.Event()

    def hold(step_id: int) -> None:
        if step_id == 0:
            began.set()
            assert go.wait(BOUND_S)

    engine.hold = hold
    steps = [step_of(0, first("a")), step_of(1, later("a"), first("b"))]
    engine.prepare(steps[0])
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(engine.steps.run, steps[0])
        assert began.wait(BOUND_S)
        engine.prepare(steps[1])
        assert engine.laid_out[-1] == (1, ["a", "b"], [])
        assert not running.done()
        go.set()
        assert running.result(BOUND_S).error == ""
    result = engine.steps.run(steps[1])
    (token,) = Engine().steps.run(steps[0]).samples
    assert token is not None
    known = SequenceSlice(RequestKey("a", 1), (token.token_id,), 2, False, (), SAMPLING)
    assert result.samples == (Engine.sample(known), Engine.sample(first("b")))


def test_who_is_lost_drops_out_of_steps_that_are_prepared() -> None:
    engine = Engine()
    steps = [
        step_of(0, first("a"), first("b")),
        step_of(1, later("a")),
        step_of(2, later("a", 3), later("b"), first("c")),
        step_of(3, later("a", 4), later("c")),
    ]
    engine.bad_steps = {1}
    engine.prepare(*steps)
    assert engine.tokens(steps[0]) == [True, True]
    assert engine.steps.run(steps[1]).error == "CannotError: "
    assert engine.tokens(steps[2]) == [False, True, True]
    assert engine.tokens(steps[3]) == [False, True]
    assert [names for _, names, _ in engine.computed[2:]] == [["b", "c"], ["c"]]


def test_a_slice_that_fails_takes_no_neighbour_along() -> None:
    engine, alone = Engine(), Engine()
    steps = [
        step_of(0, first("a"), first("b")),
        step_of(1, later("a"), later("b")),
        step_of(2, later("a", 3), later("b", 3)),
        step_of(3, first("a"), later("b", 4)),
        step_of(4, later("a")),
    ]
    of_b = [alone.steps.run(step_of(n, *step.slices[1:])).samples for n, step in enumerate(steps)]
    engine.bad_slices = {(1, "a"), (4, "a")}
    engine.prepare(*steps)
    results = [engine.steps.run(step) for step in steps]
    assert [result.errors for result in results] == [(), ("bad", ""), (), (), ()]
    assert [result.samples[1:] for result in results[:4]] == of_b[:4]
    assert results[1].samples[0] is None
    assert results[2].samples[0] is None, "lost"
    assert results[3].samples[0] is not None, "begins anew"
    assert results[4] == StepResult(4, error="bad"), "none is left"


def test_what_a_step_ends_is_told_also_if_nothing_of_it_is_computed() -> None:
    engine = Engine()
    steps = [
        step_of(0, first("a"), first("b"), first("c")),
        step_of(1, later("a")),
        step_of(2, later("a", 3), ended="b"),
        step_of(3, first("d"), ended="c"),
        step_of(4, later("d")),
    ]
    engine.bad_steps = {1}
    engine.prepare(*steps)
    results = [engine.steps.run(step) for step in steps]
    assert [bool(result.error) for result in results] == [False, True, False, False, False]
    assert results[2].samples == (None,)
    assert engine.computed[2:] == [(3, ["d"], ["b", "c"]), (4, ["d"], [])]
    assert [ended for _, _, ended in engine.laid_out] == [[], [], ["b"], ["c"], []]


def test_what_ends_is_laid_out_once_more_if_nothing_else_was() -> None:
    engine = Engine()
    engine.bad_layouts = {1}
    steps = [
        step_of(0, first("a"), first("b")),
        step_of(1, later("a")),
        step_of(2, later("a", 3), ended="b"),
        step_of(3, first("c")),
    ]
    results = [engine.steps.run(step) for step in steps]
    assert results[2] == StepResult(2, (None,))
    assert engine.laid_out[2:] == [(3, ["c"], ["b"])]
    assert engine.computed[1:] == [(3, ["c"], ["b"])]


def test_what_cannot_be_laid_out_fails_when_it_would_run() -> None:
    engine = Engine()
    engine.bad_layouts = {1}
    steps = [
        step_of(0, first("a")),
        step_of(1, later("a"), first("b"), ended="x"),
        step_of(2, later("a", 3), later("b"), first("c")),
    ]
    engine.prepare(*steps)
    assert [names for _, names, _ in engine.laid_out] == [["a"], ["a", "b"], ["c"]]
    assert engine.tokens(steps[0]) == [True], "the step before it is not touched"
    assert engine.steps.run(steps[1]) == StepResult(1, error="CannotError: ")
    assert engine.tokens(steps[2]) == [False, False, True]
    assert engine.computed[1:] == [(2, ["c"], ["x"])]


def test_who_begins_anew_is_not_lost() -> None:
    engine = Engine()
    engine.bad_steps = {0}
    steps = [
        step_of(0, first("a"), first("b")),
        step_of(1, first("a"), later("b")),
        step_of(2, later("a"), later("b", 3)),
    ]
    engine.prepare(*steps)
    assert engine.steps.run(steps[0]).error
    assert engine.tokens(steps[1]) == [True, False]
    assert engine.tokens(steps[2]) == [True, False]


def test_nothing_is_kept_of_who_ends_while_a_step_of_it_runs() -> None:
    engine = Engine()
    steps = [step_of(0, first("a")), step_of(1, first("b"), ended="a"), step_of(2, ended="b")]
    engine.prepare(*steps)
    for step in steps:
        assert engine.steps.run(step).error == ""
    assert len(engine.steps) == 0


def test_a_placeholder_needs_a_token_that_was_or_will_be_sampled() -> None:
    engine = Engine()
    silent = SequenceSlice(RequestKey("a", 1), (1, 2), 0, True, ())
    steps = [step_of(0, silent), step_of(1, later("a"))]
    engine.steps = EngineSteps(engine.lay_out, engine.compute)
    engine.prepare(*steps)
    assert engine.steps.run(steps[0]).error == ""
    assert "no token was sampled" in engine.steps.run(steps[1]).error
    assert len(engine.laid_out) == 1


def test_steps_are_run_as_they_were_prepared() -> None:
    engine = Engine()
    engine.prepare(step_of(0, first("a")), step_of(1, later("a")))
    with pytest.raises(InvariantViolation, match=r"<step 1.* is run where <step 0"):
        engine.steps.run(step_of(1, later("a")))


def walk(seed: int, ahead_max: int) -> tuple[list[StepResult], Engine]:
    """Random steps, some of which fail; each is prepared so many steps before it runs, or fewer."""
    rng, when = random.Random(seed), random.Random(seed + ahead_max)
    engine, results = Engine(), []
    engine.bad_layouts = {n for n in range(200) if rng.random() < 0.05}
    engine.bad_steps = {n for n in range(200) if rng.random() < 0.1}
    running: dict[str, int] = {}
    launched: deque[Step] = deque()
    for step_id in range(200):
        ended = "".join(name for name in running if rng.random() < 0.1)
        for name in ended:
            del running[name]
        slices = []
        for name in "abcdef":
            if rng.random() < 0.5:
                continue
            if name not in running or rng.random() < 0.1:
                running[name] = 2
                slices.append(first(name))
            else:
                slices.append(later(name, running[name]))
                running[name] += 1
        step = step_of(step_id, *slices, ended=ended)
        engine.prepare(step)
        launched.append(step)
        while len(launched) > ahead_max or (launched and when.random() < 0.4):
            results.append(engine.steps.run(launched.popleft()))
    results += [engine.steps.run(step) for step in launched]
    return results, engine


@pytest.mark.parametrize("seed", range(20))
def test_results_do_not_depend_on_how_far_ahead_steps_are_prepared(seed: int) -> None:
    expected, serial = walk(seed, 0)
    assert any(result.error for result in expected)
    assert any(None in result.samples for result in expected)
    for ahead_max in (1, 3):
        results, engine = walk(seed, ahead_max)
        assert results == expected
        assert engine.computed == serial.computed
        assert engine.laid_out == serial.laid_out


def test_control_with_one_order_for_both_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were known at a preparation what a step that still runs loses and samples."""
    make = engine_steps._Sequences
    made: list[engine_steps._Sequences] = []

    def shared() -> engine_steps._Sequences:
        made.append(make() if len(made) % 2 == 0 else made[-1])
        return made[-1]

    expected, _ = walk(1, 0)
    monkeypatch.setattr(engine_steps, "_Sequences", shared)
    with pytest.raises((AssertionError, KeyError)):
        assert walk(1, 1)[0] == expected
