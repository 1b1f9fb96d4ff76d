"""The control launches a step while the engine computes the one before it."""

import asyncio
import threading
from typing import Any, cast

import pytest
from opentelemetry.trace import NoOpTracer

from disagg.messages.identity import RequestKey
from disagg.messages.outputs import StepOutputs
from disagg.messages.sampling import SampledToken, SamplingParams
from disagg.messages.session import ToRouterMessage
from disagg.messages.stats import WorkerStats
from disagg.messages.submit import Role, Submit
from disagg.scheduling.step import PLACEHOLDER, SequenceSlice, Step, StepResult
from disagg.workers.control import Control
from disagg.workers.request_trace import RequestTrace
from tests.unit.scheduling.failure_worlds import LAYOUTS
from tests.unit.scheduling.test_block_tables import new_core
from tests.unit.workers.test_ends import BOUND_S, until
from tests.unit.workers.test_sessions import NoPeers

REQUEST = Submit(RequestKey("r", 1), Role.LOCAL, (5, 6), (), b"", SamplingParams(max_tokens=4))


class HeldEngine:
    """Ends a step each time that it is let; the tokens count up."""

    def __init__(self) -> None:
        self.go = threading.Semaphore(0)
        self.prepared: list[Step] = []
        self.begun: list[Step] = []
        self.threads: set[int] = set()
        self.preparing: set[int] = set()

    def prepare(self, step: Step) -> None:
        self.preparing.add(threading.get_ident())
        self.prepared.append(step)

    def run(self, step: Step) -> StepResult:
        assert step in self.prepared
        self.threads.add(threading.get_ident())
        self.begun.append(step)
        assert self.go.acquire(timeout=BOUND_S)
        return StepResult(step.step_id, (SampledToken(100 + step.step_id),) * len(step.slices))


async def answer(steps_max: int) -> tuple[list[int], int]:
    """The answer's tokens, and how many steps were prepared while the engine was in its first."""
    engine, links = HeldEngine(), cast(Any, NoPeers())
    core = new_core(LAYOUTS["full"], 24, steps_max=steps_max)
    control = Control(core, engine, links, pytest.fail, RequestTrace(NoOpTracer()))
    control.start(links)
    tokens: list[int] = []

    def hear(message: ToRouterMessage) -> None:
        if isinstance(message, StepOutputs):
            tokens.extend(token for one in message.outputs for token in one.token_ids)

    control.open_session(hear)
    control.router_message(REQUEST)
    await until(lambda: len(engine.begun) == 1)
    num_in_flight = core.batcher.num_in_flight
    await until(lambda: len(engine.prepared) == num_in_flight)
    assert len(engine.begun) == 1
    for _ in range(REQUEST.sampling.max_tokens):
        engine.go.release()
    await until(lambda: not core.sequences)
    await control.stop()
    assert engine.prepared == engine.begun
    assert len(engine.threads) == len(engine.preparing) == 1
    assert engine.threads != engine.preparing
    assert [step.step_id for step in engine.begun] == [0, 1, 2, 3]
    unknown = [(PLACEHOLDER,) in [one.token_ids for one in step.slices] for step in engine.begun]
    assert unknown[1] == (steps_max > 1)
    return tokens, num_in_flight


@pytest.mark.parametrize("steps_max", [1, 2, 3])
def test_steps_are_launched_while_the_first_one_runs(steps_max: int) -> None:
    assert asyncio.run(answer(steps_max)) == ([100, 101, 102, 103], steps_max)


async def fails_of(step_stuck_ms: int, *, ends: bool) -> list[str]:
    """Why a worker fails while its clock jumps on by 11 ms; ``ends``: its step ends before that."""
    engine, links, failures = HeldEngine(), cast(Any, NoPeers()), list[str]()
    core = new_core(LAYOUTS["full"], 24, steps_max=2)
    control = Control(
        core,
        engine,
        links,
        failures.append,
        RequestTrace(NoOpTracer()),
        step_stuck_ms=step_stuck_ms,
    )
    time_ms = 1_000
    control._now_ms = lambda: time_ms
    ticks = 0
    check = control._transport.check

    def count() -> None:
        nonlocal ticks
        ticks += 1
        check()

    control._transport.check = count  # type: ignore[method-assign]
    control.start(links)
    control.open_session(lambda message: None)
    control.router_message(REQUEST)
    await until(lambda: len(engine.begun) == 1)
    if ends:
        for _ in range(REQUEST.sampling.max_tokens):
            engine.go.release()
        await until(lambda: not core.sequences)
    time_ms += 11
    ticks = 0
    await until(lambda: bool(failures) or ticks > 2)
    for _ in range(REQUEST.sampling.max_tokens):
        engine.go.release()
    await control.stop()
    return failures


def test_a_step_that_does_not_end_ends_the_worker() -> None:
    """It was ready for ever: each request waited for router.request_timeout_ms, then failed."""
    (why,) = asyncio.run(fails_of(10, ends=False))
    assert why == "a step has not ended for 11 ms (scheduling.step_stuck_ms)"
    assert asyncio.run(fails_of(11, ends=False)) == []
    assert asyncio.run(fails_of(10, ends=True)) == [], "idle"


async def told_of_a_slow_step() -> list[bool]:
    """Whether a router hears that a worker has stalled: before, during and after a slow step."""
    engine, links = HeldEngine(), cast(Any, NoPeers())
    core = new_core(LAYOUTS["full"], 24)
    trace = RequestTrace(NoOpTracer())
    control = Control(core, engine, links, pytest.fail, trace, step_slow_ms=10)
    time_ms, told = 1_000, list[bool]()
    control._now_ms = lambda: time_ms

    def hear(message: ToRouterMessage) -> None:
        if isinstance(message, WorkerStats) and told[-1:] != [message.stalled]:
            told.append(message.stalled)

    control.start(links)
    control.open_session(hear)
    control.router_message(REQUEST)
    await until(lambda: len(engine.begun) == 1)
    await until(lambda: told == [False])
    time_ms += 10
    control._guard(control._report)
    assert told == [False]
    time_ms += 1
    await until(lambda: told == [False, True])
    for _ in range(REQUEST.sampling.max_tokens):
        engine.go.release()
    await until(lambda: told == [False, True, False])
    await control.stop()
    return told


def test_routers_hear_of_a_step_that_takes_long() -> None:
    assert asyncio.run(told_of_a_slow_step()) == [False, True, False]


async def stops_during_a_step() -> list[str]:
    engine, links, failures = HeldEngine(), cast(Any, NoPeers()), list[str]()
    core = new_core(LAYOUTS["full"], 24, steps_max=2)
    trace = RequestTrace(NoOpTracer())
    control = Control(core, engine, links, failures.append, trace, step_stuck_ms=60_000)
    control.start(links)
    control.open_session(lambda message: None)
    control.router_message(REQUEST)
    await until(lambda: len(engine.begun) == 1)
    control._step_stuck_ms = 1
    stopping = asyncio.create_task(control.stop())
    await until(lambda: bool(failures))
    assert not stopping.done()
    engine.go.release()
    await stopping
    return failures


def test_a_step_that_does_not_end_keeps_no_drained_worker_for_ever() -> None:
    """Its process waited for the step, and nobody looked at it any more."""
    (why,) = asyncio.run(stops_during_a_step())
    assert why == "a step has not ended while the worker stops (scheduling.step_stuck_ms)"


async def neighbours(expected_ms: float) -> list[set[str]]:
    """Who is in the first two steps, when the second request comes while the first step runs."""
    engine, links = HeldEngine(), cast(Any, NoPeers())
    core = new_core(LAYOUTS["full"], 24, steps_max=2)
    control = Control(core, engine, links, pytest.fail, RequestTrace(NoOpTracer()))
    one_token = SequenceSlice(RequestKey("before", 1), (5,), 0, True, ())
    control._pace.launched(0, Step(0, (one_token,)))
    control._pace.done(expected_ms)
    control.start(links)
    control.open_session(lambda message: None)
    for number, name in enumerate(("first", "second")):
        key = RequestKey(name, 1)
        control.router_message(Submit(key, Role.LOCAL, (5,), (), b"", SamplingParams(max_tokens=2)))
        await until(lambda: len(engine.begun) == 1)
        assert len(core.sequences) == number + 1
    for _ in range(4):
        engine.go.release()
    await until(lambda: not core.sequences)
    await control.stop()
    return [{part.key.request_id for part in step.slices} for step in engine.begun[:2]]


def test_who_comes_while_a_step_runs_is_in_the_next_one() -> None:
    assert asyncio.run(neighbours(60_000)) == [{"first"}, {"first", "second"}]


def test_who_comes_after_the_next_step_was_planned_waits_for_another() -> None:
    assert asyncio.run(neighbours(0)) == [{"first"}, {"first"}]
