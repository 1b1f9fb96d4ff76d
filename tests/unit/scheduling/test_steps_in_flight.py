"""Steps that are launched before the one before them has ended: no token is lost or comes twice.

The engine runs one step at a time, in the order of launch, over symbols: whoever computes from what
is not there is seen at once.
"""

import random
from collections import Counter, deque
from dataclasses import dataclass, field, replace

import pytest

from disagg.errors import InvariantViolation
from disagg.kv.shapes.layout import KVCacheLayout
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.outputs import FinishReason, StepOutputs
from disagg.messages.sampling import SampledToken, SamplingParams
from disagg.messages.session import Cancel, EndReason, PartEnded
from disagg.messages.submit import PeerAddress, Role, Submit
from disagg.scheduling.actions import ToRouter, WorkerAction
from disagg.scheduling.admission import num_blocks_for
from disagg.scheduling.batcher import Batcher
from disagg.scheduling.block_tables import Tables
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.engine_steps import EngineSteps, SliceSamples
from disagg.scheduling.sequence import Sequence
from disagg.scheduling.stats import check_core
from disagg.scheduling.step import PLACEHOLDER, Step, StepResult
from disagg.testing.simulation.symbolic_engine import (
    VOCAB_SIZE,
    SymbolicEngine,
    SymbolicMemory,
    expected_tokens,
)
from tests.unit.scheduling.failure_worlds import LAYOUTS
from tests.unit.scheduling.test_block_tables import new_core, result_of, submit

LAYOUT = LAYOUTS["full"]
KEY = RequestKey("r", 1)
NUM_MOVES = 400


class StepFailsError(Exception):
    """A device has its faults."""


class FailingEngine(SymbolicEngine):
    """Fails when it is told to, in the middle of a step."""

    fails = False

    def __init__(self, layout: KVCacheLayout, memory: SymbolicMemory, vocab_size: int) -> None:
        super().__init__(layout, memory, vocab_size)
        self._steps = EngineSteps(self._lay_out, self._compute, (StepFailsError,))

    def _compute(self, tables: Tables, step: Step) -> list[SliceSamples]:
        if self.fails:
            step = replace(step, slices=step.slices[: len(step.slices) // 2])
        samples = super()._compute(tables, step)
        if self.fails:
            raise StepFailsError
        return samples


@dataclass
class Client:
    prompt: tuple[int, ...]
    sampling: SamplingParams
    received: list[int] = field(default_factory=list)
    end: str = ""


class Walk:
    """A worker whose clients come and go at any moment, whose memory is short, whose steps fail."""

    def __init__(self, name: str, seed: int, steps_max: int, num_drafts: int = 0) -> None:
        self.vocab_size = 3 if num_drafts else VOCAB_SIZE
        self.rng = random.Random(f"{name} {seed}")
        self.layout = LAYOUTS[name]
        more = {"max_step_tokens": 8, "steps_max": steps_max, "num_drafts": num_drafts}
        roomy = new_core(self.layout, 1_000, **more)
        num_blocks = 2 + num_blocks_for(roomy.kv, 50) * 5 // 4
        self.core = new_core(self.layout, num_blocks, **more)
        self.engine = FailingEngine(self.layout, SymbolicMemory(num_blocks), self.vocab_size)
        self.launched: deque[Step] = deque()
        self.clients: dict[RequestKey, Client] = {}
        self.seen: Counter[str] = Counter()

    def ask(self) -> None:
        rng, key = self.rng, RequestKey(str(len(self.clients)), 1)
        prompt = tuple(rng.randrange(3) for _ in range(rng.randint(1, 30)))
        num_tokens = rng.randint(1, 20)
        stops: tuple[int, ...] = ()
        if rng.random() < 0.4:
            stops = (rng.choice(self.expected(prompt, num_tokens)),)
        sampling = SamplingParams(max_tokens=num_tokens, stop_token_ids=stops)
        self.clients[key] = Client(prompt, sampling)
        self.hear(
            self.core.on_router_message(0, Submit(key, Role.LOCAL, prompt, (), b"", sampling))
        )

    def expected(self, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
        return expected_tokens(self.layout, prompt, num_tokens, self.vocab_size)

    def hear(self, actions: list[WorkerAction]) -> None:
        for action in actions:
            match action:
                case ToRouter(StepOutputs(outputs)):
                    for output in outputs:
                        client = self.clients[output.key]
                        assert not client.end
                        assert output.position == len(client.prompt) + len(client.received)
                        client.received += output.token_ids
                        if output.finish_reason is not FinishReason.NONE:
                            client.end = output.finish_reason
                            self.seen[client.end] += 1
                case ToRouter(PartEnded(key, reason)):
                    self.clients[key].end = reason
                    self.seen[reason] += 1

    def launch(self) -> None:
        while (step := self.core.next_step(0)[0]) is not None:
            self.launched.append(step)
            self.engine.prepare(step)
            self.seen[f"{len(self.launched)} in flight"] += 1
            self.seen["placeholders"] += sum(one.token_ids == (PLACEHOLDER,) for one in step.slices)

    def end_step(self, *, fails: bool) -> None:
        step = self.launched.popleft()
        self.engine.fails = fails
        result = self.engine.run(step)
        ended = [one.key for one in step.slices if one.key not in self.core.sequences]
        self.seen["for those who have ended"] += len(ended)
        self.hear(self.core.on_step_done(0, result))

    def cancel(self) -> None:
        key = self.rng.choice(list(self.core.sequences))
        self.clients[key].end = "cancelled"
        self.core.on_router_message(0, Cancel(key, "the client went away"))

    def run(self, *, fails: float = 0.02) -> None:
        for _ in range(NUM_MOVES):
            if self.rng.random() < 0.2 and len(self.core.sequences) < 10:
                self.ask()
            if self.rng.random() < 0.05 and self.core.sequences:
                self.cancel()
            if self.launched and self.rng.random() < 0.7:
                self.end_step(fails=self.rng.random() < fails)
            self.launch()
            check_core(self.core)
        for _ in range(NUM_MOVES):
            if self.launched:
                self.end_step(fails=False)
                self.launch()
        self.check_end()

    def check_end(self) -> None:
        assert not self.core.sequences
        assert self.core.kv.num_free_blocks == self.core.kv.num_usable_blocks
        assert len(self.engine._steps) <= 10, "nothing of who has ended stays at the engine"
        for client in self.clients.values():
            expected = self.expected(client.prompt, client.sampling.max_tokens)
            for stop in client.sampling.stop_token_ids:
                expected = expected[: expected.index(stop) + 1]
            assert client.received == expected[: len(client.received)]
            if client.end in (FinishReason.STOP, FinishReason.LENGTH):
                assert client.received == expected
            assert client.end


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@pytest.mark.parametrize("steps_max", [2, 3])
def test_every_token_comes_once_and_is_right(name: str, steps_max: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(2):
        walk = Walk(name, seed, steps_max)
        walk.run()
        seen += walk.seen
        seen["preempted"] += walk.core.batcher.num_preemptions
    for what in (
        *(FinishReason.STOP, FinishReason.LENGTH, EndReason.STEP_FAILED),
        *(f"{steps_max} in flight", "placeholders", "for those who have ended", "preempted"),
    ):
        assert seen[what] > 0, what


def test_control_who_does_not_let_steps_end_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batcher, "let_steps_end", lambda self: None)
    preempt = Batcher.preempt

    def preempts(self: Batcher, seq: Sequence) -> None:
        in_flight, self._in_flight = self._in_flight, deque()
        preempt(self, seq)
        self._in_flight = in_flight

    def make_room(self, seq, num_new, chosen, preempted):  # type: ignore[no-untyped-def]
        in_flight, self._in_flight = self._in_flight, deque()
        done = right(self, seq, num_new, chosen, preempted)
        self._in_flight = in_flight
        return done

    right = Batcher._make_room
    monkeypatch.setattr(Batcher, "preempt", preempts)
    monkeypatch.setattr(Batcher, "_make_room", make_room)

    def run() -> None:
        for seed in range(10):
            Walk("full", seed, 2).run()

    with pytest.raises((AssertionError, InvariantViolation)):
        run()


# -- one by one -------------------------------------------------------------------------------


def launch(core: WorkerCore) -> Step:
    step, _ = core.next_step(0)
    assert step is not None
    return step


def tokens_of(step: Step) -> dict[str, tuple[int, tuple[int, ...]]]:
    return {one.key.request_id: (one.start, tuple(one.token_ids)) for one in step.slices}


def test_a_token_that_is_being_sampled_is_computed_by_the_next_step() -> None:
    core, rng = new_core(LAYOUT, 24, steps_max=2), random.Random(1)
    submit(core, KEY, (1, 2, 3), 3)
    steps = [launch(core), launch(core)]
    assert [tokens_of(one)["r"] for one in steps] == [(0, (1, 2, 3)), (3, (PLACEHOLDER,))]
    assert core.next_step(0) == (None, []), "no more than two"
    with pytest.raises(InvariantViolation, match="completed"):
        core.on_step_done(0, result_of(steps[1], rng, fails=False))
    core.on_step_done(0, result_of(steps[0], rng, fails=False))
    steps.append(launch(core))
    assert tokens_of(steps[2])["r"] == (4, (PLACEHOLDER,))
    core.on_step_done(0, result_of(steps[1], rng, fails=False))
    assert core.next_step(0) == (None, []), "the last token is not computed"
    actions = core.on_step_done(0, result_of(steps[2], rng, fails=False))
    assert FinishReason.LENGTH in repr(actions)


def test_control_with_one_step_in_flight_the_next_one_waits() -> None:
    core = new_core(LAYOUT, 24)
    submit(core, KEY, (1, 2, 3), 3)
    launch(core)
    assert core.next_step(0) == (None, [])


@pytest.mark.parametrize("role", [Role.LOCAL, Role.DECODE, Role.PREFILL])
def test_a_prefill_that_hands_over_ends_with_its_first_token(role: Role) -> None:
    peer = PeerAddress(Incarnation("d", "1"), "there:1")
    sampling = SamplingParams(max_tokens=5)
    core = new_core(LAYOUT, 24, steps_max=2)
    seq = core.generations.add(0, Submit(KEY, role, (1, 2, 3), (), b"", sampling, peer))
    seq.num_scheduled = 2
    assert seq.num_unscheduled == 1
    seq.num_scheduled = 3
    assert seq.num_unscheduled == (role is not Role.PREFILL)


def test_a_step_holds_the_blocks_of_who_ended_before_it() -> None:
    core = new_core(LAYOUT, 24, steps_max=2)
    sampling = SamplingParams(max_tokens=9, stop_token_ids=(7,))
    core.on_router_message(0, Submit(KEY, Role.LOCAL, (1, 2, 3), (), b"", sampling))
    first, second = launch(core), launch(core)
    actions = core.on_step_done(0, StepResult(first.step_id, (SampledToken(7),)))
    assert FinishReason.STOP in repr(actions)
    assert not core.sequences
    assert core.kv.num_free_blocks == core.kv.num_usable_blocks - 1
    assert core.on_step_done(0, StepResult(second.step_id, (SampledToken(8),))) == []
    assert core.kv.num_free_blocks == core.kv.num_usable_blocks


def test_who_lacks_memory_has_the_steps_end_and_nobody_younger_takes_it() -> None:
    """Six blocks: "old" has two of four tokens and needs a third, "young" has four."""
    core, rng = new_core(LAYOUT, 7, steps_max=2), random.Random(1)
    submit(core, RequestKey("old", 1), (1,) * 7, 9)
    submit(core, RequestKey("young", 1), (2,) * 13, 3)
    first = launch(core)
    assert [len(one.token_ids) for one in first.slices] == [7, 9]
    second = launch(core)
    assert tokens_of(second) == {"old": (7, (PLACEHOLDER,)), "young": (9, (2,) * 4)}
    core.on_step_done(0, result_of(first, rng, fails=False))
    assert core.next_step(0) == (None, []), "old lacks a block: nothing is launched"
    core.on_step_done(0, result_of(second, rng, fails=False))
    assert core.batcher.num_preemptions == 0
    third = launch(core)
    assert core.batcher.num_preemptions == 1
    assert list(tokens_of(third)) == ["old"]


def test_what_nothing_can_follow_ends_alone() -> None:
    core = new_core(LAYOUT, 24, steps_max=2)
    other = RequestKey("other", 1)
    submit(core, KEY, (1, 2, 3), 3)
    submit(core, other, (4, 5, 6), 3)
    first, second = launch(core), launch(core)
    samples = {KEY: SampledToken(7, error="no answer can match it"), other: SampledToken(8)}
    result = StepResult(first.step_id, tuple(samples[part.key] for part in first.slices))
    actions = core.on_step_done(0, result)
    ended = PartEnded(KEY, EndReason.NO_TOKEN, "no answer can match it")
    assert ToRouter(ended) in actions
    assert list(core.sequences) == [other]
    assert core.sequences[other].num_tokens == 4
    samples = {KEY: SampledToken(7, error="again"), other: SampledToken(9)}
    result = StepResult(second.step_id, tuple(samples[part.key] for part in second.slices))
    assert "again" not in repr(core.on_step_done(0, result))
    assert core.sequences[other].num_tokens == 5
