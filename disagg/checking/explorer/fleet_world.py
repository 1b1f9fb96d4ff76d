"""Three whole workers: prefix pulls in a chain, and leases that pass from one reader to another.

As in `pair_world` the workers are production cores, steps take time, READs land at any moment and a
message arrives once at any later time, or never, with ``repeats`` any number of times. In a *chain*
worker C has the prompt's beginning cached, P pulls it and prefills the rest, D decodes. In a
*take-over* P prefills for D, which crashes or loses its link, and E takes the lease over.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from disagg.checking.explorer.exploration import Exploration, Step, explore
from disagg.checking.explorer.fleet_setting import CHAIN, FleetSetting
from disagg.checking.explorer.on_way import Envelope, put
from disagg.checking.explorer.pair_memory import NOTHING, Memory, after_move, land
from disagg.checking.explorer.pair_setting import OUTPUT, PROMPT
from disagg.checking.explorer.pair_worker import (
    ASK_TIMEOUT_MS,
    LEASE_TTL_MS,
    TAKE_OVER_MS,
    Facts,
    Moved,
    Workers,
)
from disagg.errors import InvariantViolation
from disagg.kv.hashing import BlockHasher
from disagg.kv.shapes.layout import plan_layout
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.outputs import StepOutputs
from disagg.messages.peer import AskLease, PeerMessage, TakeOver
from disagg.messages.sampling import SampledToken, SamplingParams
from disagg.messages.session import (
    Cancel,
    PartEnded,
    PeerAddress,
    PullPlan,
    Role,
    Submit,
    TransferReport,
)
from disagg.scheduling.actions import ToRouter
from disagg.scheduling.step import StepResult
from disagg.transfer.actions import PostRead, Send

STRANGER = "?"
FIRST, SECOND = RequestKey("r", 1), RequestKey("r", 2)


class Read(NamedTuple):
    """A READ whose handle is not terminal."""

    side: int
    read_id: int
    owner: int
    src: int
    dst: int
    landed: bool


class Faults(NamedTuple):
    """How much has gone wrong so far."""

    evictions: int = 0
    cancels: int = 0
    read_errors: int = 0
    lost: bool = False
    stranger: tuple[int, str] = (-1, "")
    """Whom a stranger has asked for leases, until it is lost; as whose other life it came."""


class State(NamedTuple):
    """Everything that can differ between two moments."""

    cores: tuple[int, ...]
    memory: tuple[Memory, ...]
    told: frozenset[tuple[int, RequestKey, str]] = frozenset()
    """(side, generation, submit or cancel) that have arrived."""
    over: frozenset[RequestKey] = frozenset()
    """What the router has ended."""
    token_0: bool = False
    """The router has it."""
    handed: bool = False
    """The router has heard of the first generation's commit."""
    second: bool = False
    """The router has planned the take-over."""
    on_way: tuple[int, ...] = ()
    reads: frozenset[Read] = frozenset()
    faults: Faults = Faults()


class FleetWorld:
    """All steps of the world under one setting."""

    def __init__(self, setting: FleetSetting) -> None:
        self.setting = setting
        self.lives = [Incarnation(name, name[0].upper()) for name in setting.names]
        hasher = BlockHasher(b"explorer", 1)
        hashes: list[bytes] = []
        hasher.extend(hashes, (*PROMPT, OUTPUT, OUTPUT))
        self.workers = Workers(
            plan_layout(setting.specs),
            hasher,
            num_blocks=setting.num_blocks,
            passes_max=1,
            share=1.0,
            mutate=setting.mutate,
            positions={value: position for position, value in enumerate(hashes)},
            take_over_ms=TAKE_OVER_MS,
        )
        self._messages: list[Envelope] = []
        self._index: dict[Envelope, int] = {}

    def explore(self, states_max: int = 3_000_000) -> Exploration:
        """Visit everything; goals are the states in which nothing is held or goes on."""
        return explore(self._start(), self.steps, is_goal=self._is_goal, states_max=states_max)

    def _start(self) -> State:
        cores = tuple(self.workers.start(life) for life in self.lives)
        nothing: Memory = (NOTHING,) * self.setting.num_blocks
        start = State(cores, (nothing,) * len(cores))
        if self.setting.names is not CHAIN:
            return start
        # C has served the prompt alone, before anything else.
        earlier = Submit(
            RequestKey("h", 1), Role.LOCAL, PROMPT, (), b"", SamplingParams(max_tokens=1)
        )
        start = self._does(start, 0, "", "on_router_message", 0, earlier).state
        while self._facts(start, 0).step is not None:
            start = self._step_done(start, 0).state
        return start._replace(over=frozenset(), token_0=False)

    def _is_goal(self, state: State) -> bool:
        facts = self.workers.facts
        return not state.reads and all(facts[core].at_rest for core in state.cores if core >= 0)

    def steps(self, now: State) -> Iterator[Step[State]]:
        """Everything that can happen next."""
        yield from self._router_steps(now)
        for side, core in enumerate(now.cores):
            if core >= 0:
                yield from self._worker_steps(now, side)
        yield from self._loss_steps(now)
        yield from self._message_steps(now)
        for read in sorted(now.reads):
            yield from self._read_steps(now, read)

    # -- the router ---------------------------------------------------------------------------

    def _submits(self, now: State) -> Iterator[tuple[int, Submit]]:
        prefill, decode = (1, 2) if self.setting.names is CHAIN else (0, 1)
        plain = Submit(FIRST, Role.PREFILL, PROMPT, (), b"", SamplingParams(max_tokens=2))
        addresses = [PeerAddress(life, "") for life in self.lives]
        pull = PullPlan(addresses[0], 1) if self.setting.names is CHAIN else None
        yield prefill, replace(plain, peer=addresses[decode], pull=pull)
        yield decode, replace(plain, role=Role.DECODE, peer=addresses[prefill])
        if now.second:
            tokens = (*PROMPT, OUTPUT)
            sampling = SamplingParams(max_tokens=1)
            yield (
                2,
                replace(
                    plain,
                    key=SECOND,
                    role=Role.DECODE,
                    token_ids=tokens,
                    sampling=sampling,
                    peer=addresses[0],
                    take_over=FIRST,
                ),
            )

    def _router_steps(self, now: State) -> Iterator[Step[State]]:
        sides: dict[RequestKey, set[int]] = {FIRST: set(), SECOND: {0}}
        for side, submit in self._submits(now):
            sides[submit.key].add(side)
            said = (side, submit.key, "submit")
            if said not in now.told and now.cores[side] >= 0:
                after = now._replace(told=now.told | {said})
                yield self._does(after, side, "submit arrives", "on_router_message", 0, submit)
        for key in sorted(now.over, key=str):
            for side in sorted(sides[key]):
                said = (side, key, "cancel")
                was_told = (side, key, "submit") in now.told or (key == SECOND and side == 0)
                if was_told and said not in now.told and now.cores[side] >= 0:
                    after = now._replace(told=now.told | {said})
                    cancel = Cancel(key, "over")
                    yield self._does(after, side, "cancel arrives", "on_router_message", 0, cancel)
        current = SECOND if now.second else FIRST
        if now.faults.cancels < self.setting.cancels and current not in now.over:
            faults = now.faults._replace(cancels=now.faults.cancels + 1)
            ended = {FIRST, SECOND} if now.second else {FIRST}
            after = now._replace(over=now.over | ended, faults=faults)
            yield Step("the client goes away", after)

    # -- what happens inside a worker, and to its links ---------------------------------------

    def _worker_steps(self, now: State, side: int) -> Iterator[Step[State]]:
        facts, setting, faults = self._facts(now, side), self.setting, now.faults
        if facts.step is not None:
            yield self._step_done(now, side)
        if facts.backing_off or (setting.repeats and (facts.repeats or facts.asking)):
            yield self._does(now, side, "asks or retries", "tick", 0)
        if setting.question_time_outs and facts.asking:
            yield self._does(now, side, "a question times out", "tick", ASK_TIMEOUT_MS)
        if facts.orphans:
            yield self._does(now, side, "nobody took it over", "tick", TAKE_OVER_MS)
        if setting.lease_time_outs and facts.num_leases:
            yield self._does(now, side, "its leases expire", "tick", LEASE_TTL_MS)
        if facts.cached and faults.evictions < setting.evictions:
            after = now._replace(faults=faults._replace(evictions=faults.evictions + 1))
            yield self._does(after, side, "everything free is evicted", "evict")

    def _step_done(self, now: State, side: int) -> Step[State]:
        step = self._facts(now, side).step
        assert step is not None
        memory, broken = land(step, now.memory[side])
        samples = tuple(SampledToken(OUTPUT) if part.sampling else None for part in step.slices)
        after = now._replace(memory=put(now.memory, side, memory))
        result = StepResult(step.step_id, samples)
        return self._does(after, side, "a step ends", "on_step_done", 0, result, broken=broken)

    def _loss_steps(self, now: State) -> Iterator[Step[State]]:
        if self.setting.names is CHAIN:
            if self.setting.owner_lost:
                lost = ("on_peer_lost", 0)
                if self._facts(now, 1).asking or self._facts(now, 1).keys:
                    yield self._does(now, 1, "loses the cache", *lost, self.lives[0])
                if self._facts(now, 0).num_leases:
                    yield self._does(now, 0, "loses the reader", *lost, self.lives[1])
            return
        if not now.faults.lost:
            faults = now.faults._replace(lost=True)
            takes = now.token_0 and not now.handed and FIRST not in now.over
            after = now._replace(faults=faults, second=takes)
            if not takes:
                after = after._replace(over=now.over | {FIRST})
            if self.setting.crash:
                after = after._replace(
                    cores=put(now.cores, 1, -1),
                    reads=frozenset(read for read in now.reads if read.side != 1),
                    on_way=tuple(i for i in now.on_way if self._messages[i].to != self.lives[1]),
                )
                yield Step("decode crashes", after)
            else:
                # The router ends D's part; of P's lease it says nothing, if it is taken over.
                told = after.told | ({(0, FIRST, "cancel")} if takes else set())
                yield Step("the link is cut", after._replace(over=now.over | {FIRST}, told=told))
            return
        if self._facts(now, 0).num_leases or self._facts(now, 0).keys:
            yield self._does(now, 0, "loses decode", "on_peer_lost", 0, self.lives[1])
        if now.cores[1] >= 0 and self._facts(now, 1).keys:
            yield self._does(now, 1, "loses prefill", "on_peer_lost", 0, self.lives[0])

    # -- READs and messages -------------------------------------------------------------------

    def _read_steps(self, now: State, read: Read) -> Iterator[Step[State]]:
        side, others, name = read.side, now.reads - {read}, self.setting.names[read.side]
        alive = now.cores[read.owner] >= 0
        if not read.landed and alive:
            content = now.memory[read.owner][read.src]
            held = read.dst in self._facts(now, side).inbound_held
            memory = put(now.memory[side], read.dst, content)
            after = now._replace(
                memory=put(now.memory, side, memory), reads=others | {read._replace(landed=True)}
            )
            broken = "" if held else f"a READ lands in block {read.dst}, held by no transfer"
            yield Step(f"{name}: READ {read.read_id} lands: {content!r}", after, broken)
        after = now._replace(reads=others)
        done = ("on_read_done", 0, read.read_id)
        if read.landed:
            yield self._does(after, side, f"READ {read.read_id} is DONE", *done, "")
        if not alive or now.faults.read_errors < self.setting.read_errors:
            faults = now.faults._replace(read_errors=now.faults.read_errors + alive)
            after = after._replace(faults=faults)
            yield self._does(after, side, f"READ {read.read_id} fails", *done, "error")

    def _message_steps(self, now: State) -> Iterator[Step[State]]:
        for place, index in enumerate(now.on_way):
            sender, to, message = self._messages[index]
            side = self.lives.index(to)
            if now.cores[side] < 0:
                continue
            rest = now.on_way[:place] + now.on_way[place + 1 :]
            after = now if self.setting.repeats else now._replace(on_way=rest)
            label = f"hears {_shown(message)}"
            yield self._does(after, side, label, "on_peer_message", 0, sender, message)
            if self.setting.wrong_epochs:
                yield from self._from_a_stranger(now, side, sender.worker_id, message)
        side, name = now.faults.stranger
        if name and side >= 0:
            after = now._replace(faults=now.faults._replace(stranger=(-1, name)))
            gone = ("on_peer_lost", 0, Incarnation(name, STRANGER))
            yield self._does(after, side, f"loses the stranger {name}", *gone)

    def _from_a_stranger(
        self, now: State, side: int, name: str, message: PeerMessage
    ) -> Iterator[Step[State]]:
        stranger, known = Incarnation(name, STRANGER), now.faults.stranger
        label = f"hears from a stranger {_shown(message)}"
        asks = isinstance(message, AskLease | TakeOver)
        if known == (side, name) or (asks and not known[1]):
            # What it does to itself is its own affair; the promises to all others hold.
            after = now._replace(faults=now.faults._replace(stranger=(side, name)))
            yield self._does(after, side, label, "on_peer_message", 0, stranger, message)
        elif not asks and self.workers.minds(now.cores[side], stranger, message):
            label = f"{self.setting.names[side]}: {label}"
            yield Step(label, now, "a stranger's message did something")

    # -- moving -------------------------------------------------------------------------------

    def _does(
        self, now: State, side: int, label: str, method: str, *args: object, broken: str = ""
    ) -> Step[State]:
        label = f"{self.setting.names[side]}: {label}"
        try:
            moved = self.workers.move(now.cores[side], method, *args)
        except (InvariantViolation, AssertionError, KeyError) as error:
            return Step(label, now, f"{type(error).__name__}: {error}")
        before, after = self._facts(now, side), self.workers.facts[moved.core]
        memory, wrong = after_move(now.memory[side], before, after, moved.launched)
        broken = broken or wrong
        state = now._replace(
            cores=put(now.cores, side, moved.core), memory=put(now.memory, side, memory)
        )
        return Step(label, self._perform(state, side, moved), broken)

    def _perform(self, now: State, side: int, moved: Moved) -> State:
        on_way, reads, over = set(now.on_way), set(now.reads), set(now.over)
        token_0, handed = now.token_0, now.handed
        alive = [life for life, core in zip(self.lives, now.cores, strict=True) if core >= 0]
        for action in moved.actions:
            match action:
                case Send(to, message) if to in alive:
                    on_way.add(self._number(Envelope(self.lives[side], to, message)))
                case PostRead(read_id, _, owner, (src,), (dst,)):
                    from_ = self.lives.index(owner)
                    reads.add(Read(side, read_id, from_, src, dst, False))
                case ToRouter(PartEnded(key)):
                    over |= {key, FIRST} if key == SECOND else {key}
                case ToRouter(StepOutputs()) if side != 2 or self.setting.names is CHAIN:
                    token_0 = True
                case ToRouter(TransferReport(key=RequestKey(generation=1))):
                    handed = True
        return now._replace(
            on_way=tuple(sorted(on_way)),
            reads=frozenset(reads),
            over=frozenset(over),
            token_0=token_0,
            handed=handed,
        )

    def _number(self, envelope: Envelope) -> int:
        index = self._index.setdefault(envelope, len(self._messages))
        if index == len(self._messages):
            self._messages.append(envelope)
        return index

    def _facts(self, now: State, side: int) -> Facts:
        return self.workers.facts[now.cores[side]]


def _shown(message: PeerMessage) -> str:
    text = str(message).replace("RequestKey(request_id='r', generation=1)", "r1")
    return text.replace("RequestKey(request_id='r', generation=2)", "r2")
