"""Two whole workers that prefill for each other: nobody may wait in a circle.

Production cores, as in `pair_world`, but every worker has both parts. Prompts differ, memory is too
small for all of them at once, and preemption comes from real lack of memory. Messages arrive once
and in order, refused reservations are retried at any later time and without end, and nothing times
out: what comes to rest here does so by the rules alone.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from disagg.checking.explorer.exploration import Exploration, Step, explore
from disagg.checking.explorer.mutual_workers import MutualWorkers
from disagg.checking.explorer.on_way import put
from disagg.checking.explorer.pair_memory import NOTHING, Memory, after_move, land
from disagg.checking.explorer.pair_setting import nothing_taken_away
from disagg.checking.explorer.pair_worker import Facts, Moved
from disagg.errors import InvariantViolation
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.shapes.layout import plan_layout
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.outputs import FinishReason, StepOutputs
from disagg.messages.peer import AskOffers, Commit, PeerMessage, Release, Reserve, Reserved
from disagg.messages.sampling import SampledToken, SamplingParams
from disagg.messages.session import Cancel, PartEnded, PeerAddress, Role, Submit
from disagg.scheduling.actions import ToRouter
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.step import StepResult
from disagg.transfer.actions import PostRead, Send

OUTPUT = 7
TOKENS_MAX = 8
Pair = tuple[int, int]
Queues = tuple[tuple[int, ...], tuple[int, ...]]
LIVES = (Incarnation("left", "L0"), Incarnation("right", "R0"))


class Wanted(NamedTuple):
    """A request and where it is served; prefill and decode on the same worker are local."""

    prefill: int
    decode: int
    num_prompt: int = 2
    num_output: int = 2


@dataclass(frozen=True)
class MutualSetting:
    """What is asked for, and how much memory there is.

    Attributes:
        wanted: requests in the order in which the router submits them.
        num_blocks: of each pool, the null block included; one token is one block.
        at_once: all are submitted before anything else happens, to the left worker first.
        share: of a pool that hand-overs may take.
        preemptions: a leased prefill loses its blocks at the end of a step.
        starved_by: overtaken so often while it waits for memory, a request counts as starved; a
            request overtakes when it begins after the other lost its memory and ends before it
            has it again. 0: not looked at.
        mutate: takes a rule away, in negative controls.
    """

    wanted: tuple[Wanted, ...] = (Wanted(0, 1), Wanted(1, 0))
    num_blocks: int = 5
    share: float = 1.0
    at_once: bool = False
    preemptions: int = 0
    starved_by: int = 0
    mutate: Callable[[WorkerCore], None] = nothing_taken_away


class Read(NamedTuple):
    """A READ in progress; it lands and ends in one moment."""

    reader: int
    read_id: int
    src: int
    dst: int


class State(NamedTuple):
    """Everything that can differ between two moments."""

    cores: Pair
    memory: tuple[Memory, Memory]
    told: Pair = (0, 0)
    """Submits that have arrived."""
    over: frozenset[RequestKey] = frozenset()
    """What the router has ended."""
    cancelled: frozenset[tuple[int, RequestKey]] = frozenset()
    on_way: Queues = ((), ())
    """Messages to each worker, in order."""
    reads: frozenset[Read] = frozenset()
    preemptions: int = 0
    later: frozenset[RequestKey] = frozenset()
    """Got memory while somebody who had lost it waited at the same worker."""
    num_overtaken: int = 0


class MutualWorld:
    """All steps of the world under one setting."""

    def __init__(self, setting: MutualSetting) -> None:
        self.setting = setting
        hasher = BlockHasher(b"explorer", 1)
        names = "rstuv"[: len(setting.wanted)]
        self.keys = [RequestKey(name, 1) for name in names]
        self._first = {key: TOKENS_MAX * n for n, key in enumerate(self.keys)}
        self._prompts = [
            tuple(range(10 * n, 10 * n + one.num_prompt)) for n, one in enumerate(setting.wanted, 1)
        ]
        positions: dict[bytes, int] = {}
        for key, prompt in zip(self.keys, self._prompts, strict=True):
            hashes: list[bytes] = []
            hasher.extend(hashes, (*prompt, *(OUTPUT,) * (TOKENS_MAX - len(prompt))))
            positions |= {value: self._first[key] + n for n, value in enumerate(hashes)}
        layout = plan_layout((FullAttentionSpec(1, 1, 1, 2),))
        self.workers = MutualWorkers(
            layout,
            hasher,
            num_blocks=setting.num_blocks,
            passes_max=1_000_000,
            share=setting.share,
            mutate=setting.mutate,
            positions=positions,
        )
        self.submits = [list(self._submitted_to(side)) for side in (0, 1)]
        self.messages: list[tuple[int, PeerMessage]] = []
        self._index: dict[tuple[int, PeerMessage], int] = {}

    def explore(self, states_max: int = 3_000_000) -> Exploration:
        """Visit everything; goals are the states in which all is served and nothing is held."""
        nothing: Memory = (NOTHING,) * self.setting.num_blocks
        cores = (self.workers.start(LIVES[0]), self.workers.start(LIVES[1]))
        start = State(cores, (nothing, nothing))
        if self.setting.at_once:
            for side in (0, 1):
                for _ in self.submits[side]:
                    start = next(self._router_steps(start, side)).state
        return explore(start, self.steps, is_goal=self._is_goal, states_max=states_max)

    def _is_goal(self, state: State) -> bool:
        all_told = all(told == len(self.submits[side]) for side, told in enumerate(state.told))
        facts = self.workers.facts
        return all_told and not state.reads and all(facts[core].at_rest for core in state.cores)

    def steps(self, now: State) -> Iterator[Step[State]]:
        """Everything that can happen next."""
        for side in (0, 1):
            yield from self._router_steps(now, side)
            yield from self._worker_steps(now, side)
            if now.on_way[side]:
                sender, message = self.messages[now.on_way[side][0]]
                after = now._replace(on_way=put(now.on_way, side, now.on_way[side][1:]))
                call = ("on_peer_message", 0, LIVES[sender], message)
                yield self._does(after, side, f"hears {shown(message)}", *call)
        for read in sorted(now.reads):
            yield self._read_step(now, read)

    # -- what happens -------------------------------------------------------------------------

    def _submitted_to(self, side: int) -> Iterator[Submit]:
        for key, prompt, one in zip(self.keys, self._prompts, self.setting.wanted, strict=True):
            sampling = SamplingParams(max_tokens=one.num_output)
            if one.prefill == one.decode == side:
                yield Submit(key, Role.LOCAL, prompt, (), b"", sampling)
            elif one.prefill != one.decode:
                peer = PeerAddress(LIVES[1 - side], "")
                role = Role.PREFILL if side == one.prefill else Role.DECODE
                yield Submit(key, role, prompt, (), b"", sampling, peer)

    def _router_steps(self, now: State, side: int) -> Iterator[Step[State]]:
        told = now.told[side]
        if told < len(self.submits[side]):
            submit = self.submits[side][told]
            after = now._replace(told=put(now.told, side, told + 1))
            label = f"submit of {submit.key.request_id} arrives"
            yield self._does(after, side, label, "on_router_message", 0, submit)
        submitted = {submit.key for submit in self.submits[side][:told]}
        for key in sorted(now.over & submitted, key=str):
            if (side, key) not in now.cancelled:
                after = now._replace(cancelled=now.cancelled | {(side, key)})
                cancel = Cancel(key, "over")
                yield self._does(after, side, "cancel arrives", "on_router_message", 0, cancel)

    def _worker_steps(self, now: State, side: int) -> Iterator[Step[State]]:
        facts = self._facts(now, side)
        if facts.step is not None:
            yield self._step_done(now, side)
            if facts.preemptible and now.preemptions < self.setting.preemptions:
                after = now._replace(preemptions=now.preemptions + 1)
                yield self._step_done(after, side, " and a prefill is preempted", "preempt")
        if facts.backing_off:
            yield self._does(now, side, "retries", "tick", 0)

    def _step_done(
        self, now: State, side: int, and_then: str = "", method: str = "on_step_done"
    ) -> Step[State]:
        step = self._facts(now, side).step
        assert step is not None
        memory, broken = land(step, now.memory[side], self._first.__getitem__)
        samples = tuple(SampledToken(OUTPUT) if part.sampling else None for part in step.slices)
        after = now._replace(memory=put(now.memory, side, memory))
        result = StepResult(step.step_id, samples)
        label = f"a step of {_names(part.key for part in step.slices)} ends{and_then}"
        return self._does(after, side, label, method, 0, result, broken=broken)

    def _read_step(self, now: State, read: Read) -> Step[State]:
        side = read.reader
        content = now.memory[1 - side][read.src]
        held = read.dst in self._facts(now, side).inbound_held
        broken = "" if held else f"a READ lands in block {read.dst}, held by no transfer"
        memory = put(now.memory[side], read.dst, content)
        after = now._replace(memory=put(now.memory, side, memory), reads=now.reads - {read})
        label = f"READ {read.read_id} lands: {content!r} in {read.dst}"
        return self._does(after, side, label, "on_read_done", 0, read.read_id, "", broken=broken)

    # -- moving -------------------------------------------------------------------------------

    def _does(
        self, now: State, side: int, label: str, method: str, *args: object, broken: str = ""
    ) -> Step[State]:
        label = f"{LIVES[side].worker_id}: {label}"
        try:
            moved = self.workers.move(now.cores[side], method, *args)
        except (InvariantViolation, AssertionError, KeyError) as error:
            return Step(label, now, f"{type(error).__name__}: {error}")
        before, after = self._facts(now, side), self.workers.facts[moved.core]
        memory, wrong = after_move(
            now.memory[side], before, after, moved.launched, self._first.__getitem__
        )
        broken = broken or wrong
        state = now._replace(
            cores=put(now.cores, side, moved.core), memory=put(now.memory, side, memory)
        )
        # Nothing is lost here: what a tick repeats would only come twice.
        silent = (AskOffers, Commit) if method == "tick" else ()
        state = self._perform(state, side, moved, silent)
        if self.setting.starved_by:
            state, starved = self._watch(state, side, moved)
            broken = broken or starved
        cores, on_way = self.renumbered(state.cores, state.on_way)
        return Step(label, state._replace(cores=cores, on_way=on_way), broken)

    def _perform(self, now: State, side: int, moved: Moved, silent: tuple[type, ...]) -> State:
        to_peer, reads, over = list(now.on_way[1 - side]), set(now.reads), set(now.over)
        for action in moved.actions:
            match action:
                case Send(_, message) if not isinstance(message, silent):
                    to_peer.append(self.number(side, message))
                case PostRead(read_id, _, _, (src,), (dst,)):
                    reads.add(Read(side, read_id, src, dst))
                case ToRouter(PartEnded(key)):
                    over.add(key)
        return now._replace(
            on_way=put(now.on_way, 1 - side, tuple(to_peer)),
            reads=frozenset(reads),
            over=frozenset(over),
        )

    def _watch(self, now: State, side: int, moved: Moved) -> tuple[State, str]:
        """Count who overtakes a request that has lost its memory at the right worker."""
        if side != 1:
            return now, ""
        if not self.workers.numbers[now.cores[1]].preempted_waiting:
            return now._replace(later=frozenset(), num_overtaken=0), ""
        later, overtaken = set(now.later), now.num_overtaken
        for action in moved.actions:
            match action:
                case Send(_, Reserved(key, _, True)):
                    later.add(key)
                case ToRouter(StepOutputs(outputs)):
                    ended = {
                        one.key for one in outputs if one.finish_reason is not FinishReason.NONE
                    }
                    overtaken += len(ended & later)
        starved = "overtaken by one who came later" if overtaken >= self.setting.starved_by else ""
        return now._replace(later=frozenset(later), num_overtaken=overtaken), starved

    def renumbered(self, cores: Pair, on_way: Queues) -> tuple[Pair, Queues]:
        """The same, but each side's questions that still matter are numbered from 1.

        Numbers are compared with each other only, so their order is all that counts; a refused
        one that no message names is not compared with anything any more.
        """
        workers = self.workers
        for asker in (0, 1):
            kinds = {asker: Reserved, 1 - asker: Reserve | Release}
            named = [
                message
                for side in (0, 1)
                for message in (self.messages[index][1] for index in on_way[side])
                if isinstance(message, kinds[side])
            ]
            keys = {message.key for message in named}
            answered = workers.numbers[cores[1 - asker]].answered
            forgotten = frozenset(
                one.key for one in answered if not one.granted and one.key not in keys
            )
            used = {message.number for message in named} | workers.numbers[cores[asker]].asked
            for one in answered:
                if one.key not in forgotten:
                    used |= {one.number, one.released}
            order = tuple(sorted(used - {0}))
            cores = put(cores, asker, workers.renumber_asked(cores[asker], order))
            other = workers.renumber_answered(cores[1 - asker], order, forgotten)
            cores = put(cores, 1 - asker, other)
            if order != tuple(range(1, len(order) + 1)):
                queues = (self._renamed(on_way[0], kinds[0], order),)
                on_way = (*queues, self._renamed(on_way[1], kinds[1], order))
        return cores, on_way

    def _renamed(
        self, queue: tuple[int, ...], kinds: Any, order: tuple[int, ...]
    ) -> tuple[int, ...]:
        renamed: list[int] = []
        for index in queue:
            sender, message = self.messages[index]
            if isinstance(message, kinds):
                message = replace(message, number=order.index(message.number) + 1)
                index = self.number(sender, message)
            renamed.append(index)
        return tuple(renamed)

    def number(self, sender: int, message: PeerMessage) -> int:
        """A number for a message on its way."""
        index = self._index.setdefault((sender, message), len(self.messages))
        if index == len(self.messages):
            self.messages.append((sender, message))
        return index

    def _facts(self, now: State, side: int) -> Facts:
        return self.workers.facts[now.cores[side]]


def shown(message: PeerMessage) -> str:
    """A message in a trace."""
    return re.sub(r"RequestKey\(request_id='(\w)', generation=(\d)\)", r"\1\2", str(message))


def _names(keys: Iterator[RequestKey]) -> str:
    return ", ".join(key.request_id for key in keys)
