"""A step is laid out while the model computes the one before it: the control over real engines."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import pytest
from opentelemetry.trace import NoOpTracer

from disagg.messages.identity import RequestKey
from disagg.messages.outputs import StepOutputs
from disagg.messages.sampling import SamplingParams
from disagg.messages.session import PartEnded, ToRouterMessage
from disagg.messages.submit import Role, Submit
from disagg.scheduling.step import PLACEHOLDER, Step
from disagg.workers.control import Control
from disagg.workers.engines.native.native_engine import NativeEngine
from disagg.workers.engines.native.packed_batch import PackedBatch
from disagg.workers.engines.protocol import EngineFailedError
from disagg.workers.request_trace import RequestTrace
from tests.checkpoints import make_checkpoint
from tests.unit.workers.engines.digest_engine import DigestEngine
from tests.unit.workers.engines.serving import core_over, serve
from tests.unit.workers.test_ends import BOUND_S, until
from tests.unit.workers.test_sessions import NoPeers

PROMPTS = [[5, 6, 7], list(range(20, 50))]
SAMPLING = SamplingParams(max_tokens=6, temperature=1.0, seed=3, presence_penalty=1.0)


class Watched:
    """Says what an engine does, in order, and holds back its forward passes.

    Attributes:
        events: "laid out" and "computed", each with the number of the step.
        go: one more may be computed.
    """

    def __init__(self, engine: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, int]] = []
        self.go = threading.Semaphore(0)
        self.fails: set[int] = set()
        self.began = 0
        self.unknown: list[int] = []
        builder, steps = engine._builder, engine._steps
        build, prepare, forward = builder.build, steps.prepare, engine.forward

        def built(*given: Any) -> PackedBatch:
            batch = build(*given)
            self.unknown.append(len(batch.unknown))
            return batch

        def prepared(step: Step) -> None:
            prepare(step)
            self.events.append(("laid out", step.step_id))

        def held(batch: PackedBatch) -> Any:
            number, self.began = self.began, self.began + 1
            assert self.go.acquire(timeout=BOUND_S)
            assert PLACEHOLDER not in batch.input_ids
            if number in self.fails:
                self.events.append(("failed", number))
                raise ArithmeticError("a device has its faults")
            logits = forward(batch)
            self.events.append(("computed", number))
            return logits

        monkeypatch.setattr(builder, "build", built)
        monkeypatch.setattr(steps, "prepare", prepared)
        monkeypatch.setattr(engine, "forward", held)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> NativeEngine:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "gemma3", window=8)
    return NativeEngine(folder, num_blocks=200, block_tokens=4)


async def answers_of(
    engine: NativeEngine, watched: Watched, hold: Callable[[Control], Any]
) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Tokens, and reasons of ends that are none; ``hold`` is awaited in the first forward pass."""
    links = cast(Any, NoPeers())
    core = core_over(engine, 64, steps_max=2)
    control = Control(core, engine, links, pytest.fail, RequestTrace(NoOpTracer()))
    control.start(links)
    tokens: dict[str, list[int]] = {}
    ends: dict[str, str] = {}

    def hear(message: ToRouterMessage) -> None:
        if isinstance(message, StepOutputs):
            for one in message.outputs:
                tokens.setdefault(one.key.request_id, []).extend(one.token_ids)
        elif isinstance(message, PartEnded):
            ends[message.key.request_id] = message.reason

    control.open_session(hear)
    for number, prompt in enumerate(PROMPTS):
        key = RequestKey(str(number), 1)
        sampling = replace(SAMPLING, num_prompt_tokens=len(prompt))
        control.router_message(Submit(key, Role.LOCAL, tuple(prompt), (), b"", sampling))
    await until(lambda: watched.began == 1)
    await hold(control)
    for _ in range(20):
        watched.go.release()
    await until(lambda: not core.sequences and not core.batcher.num_in_flight)
    await control.stop()
    return tokens, ends


@pytest.mark.parametrize("one_thread", [False, True], ids=["", "control"])
def test_a_batch_is_laid_out_before_the_one_before_it_is_computed(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch, *, one_thread: bool
) -> None:
    expected = [serve(core_over(engine, 64), engine, [one], SAMPLING)[0] for one in PROMPTS]
    watched = Watched(engine, monkeypatch)

    async def until_it_is_laid_out(control: Control) -> None:
        await until(lambda: control.core.batcher.num_in_flight == 2)
        if not one_thread:
            await until(lambda: ("laid out", 1) in watched.events)
            assert ("computed", 0) not in watched.events

    if one_thread:
        pool = ThreadPoolExecutor(1)
        monkeypatch.setattr(
            "disagg.workers.engine_threads.ThreadPoolExecutor", lambda *_, **__: pool
        )
    tokens, ends = asyncio.run(answers_of(engine, watched, until_it_is_laid_out))
    assert [tokens[name] for name in sorted(tokens)] == expected
    assert not ends
    before = watched.events.index(("laid out", 1)) < watched.events.index(("computed", 0))
    assert before != one_thread
    assert sum(watched.unknown) > 0


def test_a_step_fails_while_the_next_one_is_prepared(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sequences end; who came with the step after it gets the tokens it would have got."""
    expected = serve(core_over(engine, 64), engine, [PROMPTS[1]], SAMPLING)[0]
    watched = Watched(engine, monkeypatch)
    watched.fails = {0}

    async def until_it_is_laid_out(control: Control) -> None:
        await until(lambda: ("laid out", 1) in watched.events)

    tokens, ends = asyncio.run(answers_of(engine, watched, until_it_is_laid_out))
    assert set(ends) == {"0"}
    assert tokens == {"1": expected}
    assert watched.events[:3] == [("laid out", 0), ("laid out", 1), ("failed", 0)]


def test_an_engine_that_fails_while_it_prepares_ends_the_worker() -> None:
    class FailedEngine(DigestEngine):
        def prepare(self, step: Step) -> None:
            raise EngineFailedError("the device is gone")

    async def failures() -> list[str]:
        said: list[str] = []
        links = cast(Any, NoPeers())
        engine = FailedEngine(64)
        core = core_over(engine, 64, steps_max=2)
        control = Control(core, engine, links, said.append, RequestTrace(NoOpTracer()))
        control.start(links)
        key = RequestKey("r", 1)
        control.router_message(
            Submit(key, Role.LOCAL, (1, 2), (), b"", SamplingParams(max_tokens=2))
        )
        await until(lambda: bool(said))
        await control.stop()
        return said

    assert asyncio.run(failures()) == ["the device is gone"]
