"""Whole workers with their memory: production cores, thawed, moved and frozen again."""

from dataclasses import dataclass
from typing import Any

from disagg.checking.explorer.memory import NOTHING, Memory, land, launch, reuse
from disagg.checking.explorer.setting import Setting
from disagg.checking.explorer.snapshots import Frozen, Snapshots
from disagg.checking.explorer.tokens import Vocabulary
from disagg.checking.explorer.worker_state import (
    Facts,
    check,
    evict,
    facts_of,
    forget_stranger,
    limits_of,
    make_canonical,
    new_core,
    preempt,
)
from disagg.kv.hashing import BlockHasher
from disagg.kv.shapes.layout import plan_layout
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.outputs import FinishReason, StepOutputs
from disagg.messages.peer import PeerMessage, Reserved
from disagg.messages.sampling import SampledToken
from disagg.scheduling.actions import CheckTransport, ToRouter, WorkerAction
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.step import StepResult
from disagg.transfer.actions import Send


@dataclass(frozen=True, slots=True)
class Moved:
    """One move: the worker's number afterwards, what it wants done, the promise it breaks."""

    worker: int
    actions: tuple[WorkerAction, ...]
    broken: str


@dataclass(frozen=True, slots=True)
class _CoreMoved:
    core: int
    actions: tuple[WorkerAction, ...]
    launched: bool


Overtaking = tuple[frozenset[RequestKey], int]
"""Who got memory here while somebody who had lost it waits; how many of them have ended."""
_Worker = tuple[int, Memory, Overtaking]
_NOBODY: Overtaking = (frozenset(), 0)


class Workers:
    """Every state of a worker that was ever seen, by number; each move is made only once.

    A worker is its core, the bytes in its pool, and who overtakes whom there.

    Attributes:
        facts: per number.
        memory: per number.
    """

    def __init__(self, setting: Setting, hasher: BlockHasher, vocabulary: Vocabulary) -> None:
        self._setting = setting
        self._vocabulary = vocabulary
        self._layout = plan_layout(setting.specs)
        self._hasher = hasher
        self._limits = limits_of(setting)
        constants: list[Any] = [self._layout, hasher, self._limits, *self._layout.groups]
        self._snapshots = Snapshots(constants)
        self._cores: list[tuple[Frozen, Facts]] = []
        self._core_numbers: dict[Frozen, int] = {}
        self._core_moves: dict[tuple[Any, ...], _CoreMoved] = {}
        self._workers: list[_Worker] = []
        self._numbers: dict[_Worker, int] = {}
        self._moves: dict[tuple[Any, ...], Moved] = {}
        self._minds: dict[tuple[int, Incarnation, PeerMessage], bool] = {}
        self.facts: list[Facts] = []
        self.memory: list[Memory] = []

    def start(self, me: Incarnation) -> int:
        """A worker that has just started."""
        core = new_core(me, self._layout, self._hasher, self._limits, self._setting.num_blocks)
        self._setting.mutate(core)
        return self._number(self.freeze(core), (NOTHING,) * self._setting.num_blocks, _NOBODY)

    def move(self, number: int, method: str, *args: object) -> Moved:
        """Call a method of the core, then launch a step if the engine is idle."""
        call = (number, method, *args)
        moved = self._moves.get(call)
        if moved is None:
            core, memory, overtaking = self._workers[number]
            moved = self._moves[call] = self._moved(core, memory, overtaking, "", method, args)
        return moved

    def end_step(self, number: int, how: str) -> Moved:
        """The step in flight has written; ``how``: it "ends", "fails", or "preempt" follows."""
        call = (number, how)
        moved = self._moves.get(call)
        if moved is None:
            core, memory, overtaking = self._workers[number]
            running = self.facts[number].running
            assert running is not None
            broken, result = "", StepResult(running.step.step_id, error="failed")
            if how != "fails":
                memory, broken = land(running, memory, self._layout.hash_block_tokens)
                samples = tuple(
                    SampledToken(
                        self._vocabulary.sample(
                            part.key.generation, tokens[: part.start + len(part.token_ids)]
                        )
                    )
                    if part.sampling
                    else None
                    for part, tokens in zip(running.step.slices, running.tokens, strict=True)
                )
                result = StepResult(running.step.step_id, samples)
            method = "preempt" if how == "preempt" else "on_step_done"
            moved = self._moved(core, memory, overtaking, broken, method, (0, result))
            self._moves[call] = moved
        return moved

    def write(self, number: int, block: int, content: str) -> int:
        """The worker after a READ wrote into its memory."""
        core, memory, overtaking = self._workers[number]
        written = (*memory[:block], content, *memory[block + 1 :])
        return self._number(core, written, overtaking)

    def minds(self, number: int, stranger: Incarnation, message: PeerMessage) -> bool:
        """Whether a message from a life nobody knows does more than get an answer."""
        core = self._workers[number][0]
        call = (core, stranger, message)
        if call not in self._minds:
            moved = self._core_move(core, "on_peer_message", (0, stranger, message))
            after = self.thaw_core(moved.core)
            forget_stranger(after, stranger)
            answers = all(
                isinstance(one, CheckTransport) or (isinstance(one, Send) and one.to == stranger)
                for one in moved.actions
            )
            self._minds[call] = not (answers and self.freeze(after) == core)
        return self._minds[call]

    def thaw(self, number: int) -> WorkerCore:
        """A copy of a worker's core, to look at."""
        return self.thaw_core(self._workers[number][0])

    # -- inside -------------------------------------------------------------------------------

    def _moved(
        self,
        core: int,
        memory: Memory,
        overtaking: Overtaking,
        broken: str,
        method: str,
        args: tuple[object, ...],
    ) -> Moved:
        moved = self._core_move(core, method, args)
        before, after = self._cores[core][1], self._cores[moved.core][1]
        blocks = {block for _, block in after.cached}
        memory = reuse(memory, before.held, after.held, blocks)
        for known, block in after.cached:
            if memory[block] != known:
                broken = broken or f"the cache offers {memory[block]!r} as {known!r}"
        if moved.launched and after.running is not None:
            memory, wrong = launch(after.running, memory, self._layout.hash_block_tokens)
            broken = broken or wrong
        if self._setting.starved_by:
            overtaking = _watch(overtaking, after.memory_awaited, moved.actions)
            if overtaking[1] >= self._setting.starved_by:
                broken = broken or "overtaken by one who came later"
        return Moved(self._number(moved.core, memory, overtaking), moved.actions, broken)

    def _core_move(self, number: int, method: str, args: tuple[object, ...]) -> _CoreMoved:
        call = (number, method, *args)
        moved = self._core_moves.get(call)
        if moved is None:
            core = self.thaw_core(number)
            if method == "preempt":
                actions = [*core.on_step_done(*args), *preempt(core)]  # type: ignore[arg-type]
            elif method == "evict":
                actions = evict(core)
            else:
                actions = getattr(core, method)(*args)
            step, more = core.next_step(0)
            check(core)
            moved = _CoreMoved(self.freeze(core), (*actions, *more), step is not None)
            self._core_moves[call] = moved
        return moved

    def thaw_core(self, number: int) -> WorkerCore:
        """A copy of a core, by the core's own number."""
        core = self._snapshots.thaw(self._cores[number][0])
        assert isinstance(core, WorkerCore)
        return core

    def freeze(self, core: WorkerCore) -> int:
        """The number of a core; equal cores have equal ones."""
        make_canonical(core)
        frozen = self._snapshots.freeze(core)
        number = self._core_numbers.get(frozen)
        if number is None:
            number = self._core_numbers[frozen] = len(self._cores)
            self._cores.append((frozen, facts_of(core, self._vocabulary)))
        return number

    def _number(self, core: int, memory: Memory, overtaking: Overtaking) -> int:
        worker = (core, memory, overtaking)
        number = self._numbers.get(worker)
        if number is None:
            number = self._numbers[worker] = len(self._workers)
            self._workers.append(worker)
            self.facts.append(self._cores[core][1])
            self.memory.append(memory)
        return number


def _watch(overtaking: Overtaking, awaited: bool, actions: tuple[WorkerAction, ...]) -> Overtaking:
    """Count who overtakes a request that has lost its memory."""
    if not awaited:
        return _NOBODY
    later, num_overtaken = set(overtaking[0]), overtaking[1]
    for action in actions:
        match action:
            case Send(_, Reserved(key, _, True)):
                later.add(key)
            case ToRouter(StepOutputs(outputs)):
                ended = {one.key for one in outputs if one.finish_reason is not FinishReason.NONE}
                num_overtaken += len(ended & later)
    return frozenset(later), num_overtaken
