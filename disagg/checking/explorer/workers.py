"""Whole workers with their memory: production cores, thawed, moved and frozen again."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from disagg.checking.explorer.memory import (
    NOTHING,
    OLD,
    Memory,
    aged,
    land,
    launch,
    leave,
    reuse,
    wrong_placeholder,
)
from disagg.checking.explorer.setting import Setting
from disagg.checking.explorer.snapshots import Snapshots
from disagg.checking.explorer.state import Facts, put
from disagg.checking.explorer.tables_worker import TablesWorker
from disagg.checking.explorer.tokens import Vocabulary
from disagg.checking.explorer.worker_state import (
    check,
    evict,
    facts_of,
    forget_stranger,
    limits_of,
    make_canonical,
    new_core,
    preempt,
    send_whole_tables,
    store,
    tiers_of,
)
from disagg.kv.hashing import BlockHasher
from disagg.kv.shapes.layout import plan_layout
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.outputs import FinishReason, StepOutputs
from disagg.messages.peer import PeerMessage, Reserved
from disagg.messages.sampling import SampledToken
from disagg.messages.session import ResetPrefixCache
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


Overtaking = tuple[frozenset[RequestKey], int]
"""Who got memory here while somebody who had lost it waits; how many of them have ended."""
_Worker = tuple[int, Memory, Overtaking, bool]
_NOBODY: Overtaking = (frozenset(), 0)


class Workers:
    """Every state of a worker that was ever seen, by number; each move is made only once.

    A worker is its core, the bytes in its pool, who overtakes whom there, and whether a reset of
    its prefix cache is on its way to it: until then it may offer what is old.

    Attributes:
        facts: per number.
        memory: per number.
        move: the worker after a move, which is called only once: see `_move`.
        minds: whether a stranger's message changes a worker: see `_minds`.
    """

    def __init__(self, setting: Setting, hasher: BlockHasher, vocabulary: Vocabulary) -> None:
        self._setting = setting
        self._vocabulary = vocabulary
        self._layout = plan_layout(setting.specs)
        self._hasher = hasher
        self._limits, self._tiers = limits_of(setting), tiers_of(setting)
        constants: list[Any] = [self._layout, hasher, self._limits, *self._layout.groups]
        self._snapshots = Snapshots(constants)
        self._core_facts: list[Facts] = []
        self._workers: list[_Worker] = []
        self._numbers: dict[_Worker, int] = {}
        self.move, self.minds = cache(self._move), cache(self._minds)
        self._core_move = cache(self._moved_core)
        self.facts: list[Facts] = []
        self.memory: list[Memory] = []

    def start(self, me: Incarnation) -> int:
        """A worker that has just started."""
        setting = self._setting
        cls = TablesWorker if setting.tables_alone else WorkerCore
        side = setting.workers.index(me.worker_id)
        tiers = self._tiers if side in setting.tiers_at else ()
        core = new_core(
            me, self._layout, self._hasher, self._limits, setting.num_blocks, cls, tiers
        )
        if tiers and setting.stored:
            store(core, self._hasher, [request.prompt for request in setting.requests])
        if isinstance(core, TablesWorker):
            core.owns, core.tries_left = me.worker_id == setting.workers[0], setting.tries
        setting.mutate(core)
        return self._number(self.freeze(core), (NOTHING,) * setting.num_blocks, _NOBODY, False)

    def _move(self, number: int, method: str, *args: object) -> Moved:
        """Call a method of the core, then launch what may be launched.

        Besides the core's methods: the step that runs "ends", "fails", or "ends_preempted", which
        takes the blocks of the youngest prefill; and everything free is evicted by "evict".
        """
        core, memory, overtaking, outdated = self._workers[number]
        broken = ""
        ends = method in ("ends", "fails", "ends_preempted")
        if ends:
            memory, broken, result = self._step_over(number, method == "fails")
            method, args = "preempt" if method == "ends_preempted" else "on_step_done", (0, result)
        moved = self._core_move(core, method, *args)
        before, after = self._core_facts[core], self._core_facts[moved.core]
        blocks = {block for _, block in after.cached}
        memory = reuse(memory, before.held, after.held, blocks)
        for block, content in after.computed if not before.computed else ():
            memory = put(memory, block, content)
        if method == "on_router_message" and isinstance(args[1], ResetPrefixCache):
            outdated = False
        for known, block in after.cached:
            if memory[block] != known and not (outdated and memory[block] == OLD + known):
                broken = broken or f"the cache offers {memory[block]!r} as {known!r}"
        if after.running is not None:
            if ends or before.running is None:
                memory, wrong = launch(after.running, memory, self._layout.hash_block_tokens)
                broken = broken or wrong
            broken = broken or wrong_placeholder((after.running, *after.queued))
        if self._setting.starved_by:
            overtaking = _watch(overtaking, after.memory_awaited, moved.actions)
            if overtaking[1] >= self._setting.starved_by:
                broken = broken or "overtaken by one who came later"
        worker = self._number(moved.core, memory, overtaking, outdated)
        return Moved(worker, moved.actions, broken)

    def _step_over(self, number: int, fails: bool) -> tuple[Memory, str, StepResult]:
        """Memory after the step that runs, what it overwrote, if anything, and its result."""
        running, memory = self.facts[number].running, self.memory[number]
        assert running is not None
        if fails:
            memory = leave(running, memory, self._layout.hash_block_tokens)
            return memory, "", StepResult(running.step.step_id, error="failed")
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
        return memory, broken, StepResult(running.step.step_id, samples)

    def write(self, number: int, block: int, content: str) -> int:
        """The worker after a READ wrote into its memory."""
        core, memory, overtaking, outdated = self._workers[number]
        return self._number(core, put(memory, block, content), overtaking, outdated)

    def age(self, number: int) -> int:
        """The worker when all that was computed before is old, and it has not heard of that."""
        core, memory, overtaking, _ = self._workers[number]
        return self._number(core, tuple(map(aged, memory)), overtaking, True)

    def _minds(self, number: int, stranger: Incarnation, message: PeerMessage) -> bool:
        """Whether a message from a life nobody knows does more than get an answer."""
        core = self._workers[number][0]
        moved = self._core_move(core, "on_peer_message", 0, stranger, message)
        after = self._snapshots.thaw(moved.core)
        forget_stranger(after, stranger)
        answers = all(
            isinstance(one, CheckTransport) or (isinstance(one, Send) and one.to == stranger)
            for one in moved.actions
        )
        return not (answers and self.freeze(after) == core)

    def thaw(self, number: int) -> Any:
        """A copy of a worker's core, to look at."""
        return self._snapshots.thaw(self._workers[number][0])

    # -- inside -------------------------------------------------------------------------------

    def _moved_core(self, number: int, method: str, *args: object) -> _CoreMoved:
        core = self._snapshots.thaw(number)
        if method == "preempt":
            actions = [*core.on_step_done(*args), *preempt(core)]
        elif method == "evict":
            actions = evict(core)
        else:
            actions = getattr(core, method)(*args)
        step, more = core.next_step(0)
        while step is not None:
            actions = [*actions, *more]
            send_whole_tables(core)
            step, more = core.next_step(0)
        check(core)
        return _CoreMoved(self.freeze(core), (*actions, *more))

    def freeze(self, core: WorkerCore) -> int:
        """The number of a core; equal cores have equal ones."""
        make_canonical(core)
        number = self._snapshots.freeze(core)
        if number == len(self._core_facts):
            self._core_facts.append(facts_of(core, self._vocabulary))
        return number

    def _number(self, core: int, memory: Memory, overtaking: Overtaking, outdated: bool) -> int:
        worker = (core, memory, overtaking, outdated)
        number = self._numbers.get(worker)
        if number is None:
            number = self._numbers[worker] = len(self._workers)
            self._workers.append(worker)
            self.facts.append(self._core_facts[core])
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
