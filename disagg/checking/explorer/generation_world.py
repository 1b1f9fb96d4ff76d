"""One request that the router plans anew while messages of the first plan are on their way.

The router and the workers are production cores. The streams between them, both ways, keep their
order and may be late by any time, each for itself; a worker that crashes may have said more than
the router ever hears. What workers say to each other arrives at most once, at any later time.
"""

from collections.abc import Iterator
from typing import Any

from disagg.checking.explorer.exploration import Exploration, Step, explore
from disagg.checking.explorer.generation_router import RouterMoved, Routers
from disagg.checking.explorer.generation_setting import NAMES, GenerationSetting
from disagg.checking.explorer.generation_state import (
    CRASHED,
    ROLES,
    Read,
    State,
    life_of,
    shown,
)
from disagg.checking.explorer.generation_tokens import (
    PROMPT,
    Prefixes,
    Prompts,
    land,
    launch,
    samples,
    wrong_next,
)
from disagg.checking.explorer.on_way import Envelope, put
from disagg.checking.explorer.pair_memory import NOTHING, Memory, reuse
from disagg.checking.explorer.pair_setting import FULL
from disagg.checking.explorer.pair_worker import ASK_TIMEOUT_MS, TAKE_OVER_MS, Facts, Moved, Workers
from disagg.errors import InvariantViolation, ProtocolError
from disagg.kv.hashing import BlockHasher
from disagg.kv.shapes.layout import plan_layout
from disagg.messages.identity import Incarnation
from disagg.messages.sampling import SampledToken, SamplingParams
from disagg.messages.session import Submit, ToRouterMessage, ToWorkerMessage
from disagg.routing.actions import Deliver, Fail, NewRequest, ToWorker
from disagg.scheduling.actions import ToRouter
from disagg.scheduling.step import StepResult
from disagg.transfer.actions import PostRead, Send


class GenerationWorld:
    """All steps of the world under one setting."""

    def __init__(self, setting: GenerationSetting) -> None:
        self.setting = setting
        self.roles = (*ROLES, setting.second) if setting.second else ROLES
        hasher = BlockHasher(b"explorer", 1)
        self._prefixes = Prefixes(hasher, setting.max_tokens, setting.generations_max)
        self.workers = Workers(
            plan_layout((FULL,)),
            hasher,
            num_blocks=setting.num_blocks,
            passes_max=setting.passes_max,
            share=1.0,
            mutate=setting.mutate,
            positions=self._prefixes.numbers,
            take_over_ms=TAKE_OVER_MS,
        )
        self.routers = Routers(hasher, setting.generations_max - 1, setting.mutate_router)
        self._messages: list[Any] = []
        self._index: dict[Any, int] = {}

    def explore(self, states_max: int = 3_000_000) -> Exploration:
        """Visit everything; goals are those in which the client has its end and nothing is held."""
        return explore(self.start(), self.steps, is_goal=self._is_goal, states_max=states_max)

    def start(self) -> State:
        """The router has planned the request; nobody has heard of it."""
        sides = range(len(self.roles))
        sampling = SamplingParams(max_tokens=self.setting.max_tokens)
        request = NewRequest("r", PROMPT, (), b"", sampling)
        lives = [life_of(side, 0) for side in sides]
        moved = self.routers.start(list(zip(lives, self.roles, strict=True)), request)
        nothing: Memory = (NOTHING,) * self.setting.num_blocks
        empty: tuple[tuple[int, ...], ...] = ((),) * len(sides)
        start = State(
            moved.router,
            tuple(self.workers.start(life) for life in lives),
            (0,) * len(sides),
            (nothing,) * len(sides),
            up=empty,
            down=empty,
            prompts=Prompts(),
        )
        after, broken = self._wishes(start, moved)
        assert not broken, broken
        return after

    def _is_goal(self, state: State) -> bool:
        facts = self.workers.facts
        rests = all(facts[core].at_rest for core in state.cores if core != CRASHED)
        return bool(state.outcome) and not state.reads and rests

    def steps(self, now: State) -> Iterator[Step[State]]:
        """Everything that can happen next."""
        for side, core in enumerate(now.cores):
            yield from self._stream_steps(now, side)
            if core != CRASHED:
                yield from self._worker_steps(now, side)
            yield from self._crash_steps(now, side)
            yield from self._cut_steps(now, side)
        yield from self._message_steps(now)
        for read in sorted(now.reads):
            yield from self._read_steps(now, read)
        if not now.outcome and now.faults.cancels < self.setting.cancels:
            after = now._replace(
                outcome="cancelled", faults=now.faults._replace(cancels=now.faults.cancels + 1)
            )
            yield self._routes(after, "the client goes away", "cancel", "r", "gone")

    # -- the router's streams -----------------------------------------------------------------

    def _stream_steps(self, now: State, side: int) -> Iterator[Step[State]]:
        name, life = NAMES[side], life_of(side, now.lives[side])
        if now.up[side]:
            first, *rest = now.up[side]
            message: ToRouterMessage = self._messages[first]
            after = now._replace(up=put(now.up, side, tuple(rest)))
            label = f"router: hears of {name} {shown(message)}"
            yield self._routes(after, label, "from_worker", life, message)
        if now.down[side]:
            first, *rest = now.down[side]
            order: ToWorkerMessage = self._messages[first]
            after = now._replace(down=put(now.down, side, tuple(rest)))
            yield self._does(after, side, f"hears {shown(order)}", "on_router_message", 0, order)

    def _crash_steps(self, now: State, side: int) -> Iterator[Step[State]]:
        name, life, faults = NAMES[side], life_of(side, now.lives[side]), now.faults
        if now.cores[side] == CRASHED:
            if life in self.routers.known[now.router]:
                after = now._replace(up=put(now.up, side, ()))
                yield self._routes(after, f"router: loses {name}", "session_lost", life)
            if self.setting.restarts and not now.outcome:
                number = now.lives[side] + 1
                fresh = self.workers.start(life_of(side, number))
                after = now._replace(
                    cores=put(now.cores, side, fresh),
                    lives=put(now.lives, side, number),
                    up=put(now.up, side, ()),
                )
                back = (life_of(side, number), self.roles[side])
                yield self._routes(after, f"{name} is back", "join", *back)
        elif side in self.setting.crashes and side not in faults.crashes and not now.outcome:
            nothing: Memory = (NOTHING,) * self.setting.num_blocks
            after = now._replace(
                cores=put(now.cores, side, CRASHED),
                memory=put(now.memory, side, nothing),
                down=put(now.down, side, ()),
                cut=tuple(one for one in now.cut if one != side),
                on_way=tuple(i for i in now.on_way if self._messages[i].to != life),
                reads=frozenset(read for read in now.reads if read.side != side),
                faults=faults._replace(crashes=(*faults.crashes, side)),
            )
            yield Step(f"{name} crashes", after)

    def _cut_steps(self, now: State, side: int) -> Iterator[Step[State]]:
        name, life, faults = NAMES[side], life_of(side, now.lives[side]), now.faults
        if now.cores[side] == CRASHED:
            return
        if side not in now.cut:
            if side in self.setting.cuts and side not in faults.cuts and not now.outcome:
                more = faults._replace(cuts=(*faults.cuts, side))
                yield Step(
                    f"{name}'s session breaks", now._replace(cut=(*now.cut, side), faults=more)
                )
            return
        if self._facts(now, side).keys or now.down[side]:
            after = now._replace(down=put(now.down, side, ()))
            yield self._does(after, side, "loses the router", "on_router_lost", 0)
        if life in self.routers.known[now.router]:
            after = now._replace(up=put(now.up, side, ()))
            yield self._routes(after, f"router: loses {name}", "session_lost", life)
        elif not now.outcome:
            label = "has a new session"
            said = () if not self.setting.late_sessions else now.down[side]
            ended = self._does(now, side, label, "on_router_lost", 0)
            after = ended.state._replace(
                down=put(now.down, side, said), cut=tuple(one for one in now.cut if one != side)
            )
            joined = self._routes(after, f"{name}: {label}", "join", life, self.roles[side])
            yield Step(joined.label, joined.state, ended.broken or joined.broken)

    # -- what happens inside a worker, and to its links ---------------------------------------

    def _worker_steps(self, now: State, side: int) -> Iterator[Step[State]]:
        facts, faults = self._facts(now, side), now.faults
        if facts.step is not None:
            memory, broken = land(facts.step, now.memory[side], now.prompts)
            result = StepResult(
                facts.step.step_id,
                tuple(
                    SampledToken(samples(part)) if part.sampling else None
                    for part in facts.step.slices
                ),
            )
            after = now._replace(memory=put(now.memory, side, memory))
            yield self._does(after, side, "a step ends", "on_step_done", 0, result, broken=broken)
            if faults.step_errors < self.setting.step_errors and not now.outcome:
                after = now._replace(faults=faults._replace(step_errors=faults.step_errors + 1))
                failed = StepResult(facts.step.step_id, error="failed")
                yield self._does(after, side, "a step fails", "on_step_done", 0, failed)
        if facts.cached and faults.evictions < self.setting.evictions and not now.outcome:
            after = now._replace(faults=faults._replace(evictions=faults.evictions + 1))
            yield self._does(after, side, "everything free is evicted", "evict")
        if facts.backing_off:
            yield self._does(now, side, "gives up or retries", "tick", 0)
        if facts.orphans:
            yield self._does(now, side, "nobody took it over", "tick", TAKE_OVER_MS)
        if facts.asking and not now.outcome and faults.time_outs < self.setting.time_outs:
            after = now._replace(faults=faults._replace(time_outs=faults.time_outs + 1))
            yield self._does(after, side, "a question times out", "tick", ASK_TIMEOUT_MS)
        for other in faults.crashes:
            dead = life_of(other, 0)
            if other != side and (facts.keys or facts.num_leases):
                after = now
                if self.setting.peers_in_order:  # its stream has ended
                    rest = (i for i in now.on_way if not self._between(i, dead, facts.me))
                    after = now._replace(on_way=tuple(rest))
                yield self._does(after, side, f"loses {NAMES[other]}", "on_peer_lost", 0, dead)

    def _between(self, index: int, sender: Incarnation, to: Incarnation) -> bool:
        envelope = self._messages[index]
        return bool(envelope.sender == sender and envelope.to == to)

    # -- READs and messages -------------------------------------------------------------------

    def _read_steps(self, now: State, read: Read) -> Iterator[Step[State]]:
        side, others = read.side, now.reads - {read}
        name, whole = NAMES[side], self.setting.whole_reads
        from_ = NAMES.index(read.owner.worker_id)
        alive = now.cores[from_] != CRASHED and life_of(from_, now.lives[from_]) == read.owner
        after, landed = now._replace(reads=others), read.landed
        broken = ""
        if not landed and alive:
            content = now.memory[from_][read.src]
            if read.dst not in self._facts(now, side).inbound_held:
                broken = f"a READ lands in block {read.dst}, held by no transfer"
            memory = put(now.memory[side], read.dst, content)
            after = now._replace(memory=put(now.memory, side, memory), reads=others)
            if not whole:
                there = after._replace(reads=others | {read._replace(landed=True)})
                yield Step(f"{name}: READ {read.read_id} lands: {content!r}", there, broken)
                after = now._replace(reads=others)
            landed = whole
        done = ("on_read_done", 0, read.read_id)
        if landed:
            label = f"READ {read.read_id} is DONE"
            yield self._does(after, side, label, *done, "", broken=broken)
        errors = now.faults.read_errors
        if not alive or (errors < self.setting.read_errors and not now.outcome):
            faults = now.faults._replace(read_errors=errors + alive)
            after = after._replace(faults=faults)
            yield self._does(after, side, f"READ {read.read_id} fails", *done, "error")

    def _message_steps(self, now: State) -> Iterator[Step[State]]:
        seen = set()
        for place, index in enumerate(now.on_way):
            sender, to, message = self._messages[index]
            if self.setting.peers_in_order and (sender, to) in seen:
                continue
            seen.add((sender, to))
            rest = now.on_way[:place] + now.on_way[place + 1 :]
            call = ("on_peer_message", 0, sender, message)
            side = NAMES.index(to.worker_id)
            yield self._does(now._replace(on_way=rest), side, f"hears {shown(message)}", *call)

    # -- moving -------------------------------------------------------------------------------

    def _does(
        self, now: State, side: int, label: str, method: str, *args: object, broken: str = ""
    ) -> Step[State]:
        label = f"{NAMES[side]}: {label}"
        try:
            moved = self.workers.move(now.cores[side], method, *args)
        except (InvariantViolation, AssertionError, KeyError) as error:
            return Step(label, now, f"{type(error).__name__}: {error}")
        before, after = self._facts(now, side), self.workers.facts[moved.core]
        memory = reuse(
            now.memory[side], before.held, after.held, {block for _, block in after.cached}
        )
        for number, block in after.cached:
            if memory[block] != self._prefixes.content(number):
                known = self._prefixes.content(number)
                broken = broken or f"the cache offers {memory[block]!r} as {known!r}"
        if moved.launched is not None:
            memory, wrong = launch(moved.launched, memory, now.prompts)
            broken = broken or wrong
        state = now._replace(
            cores=put(now.cores, side, moved.core), memory=put(now.memory, side, memory)
        )
        state = self._perform(state, side, moved)
        state, wrong = self._over(state) if state.outcome else (state, "")
        return Step(label, state, broken or wrong)

    def _perform(self, now: State, side: int, moved: Moved) -> State:
        me = self._facts(now, side).me
        on_way, reads, up = list(now.on_way), set(now.reads), list(now.up[side])
        for action in moved.actions:
            match action:
                case Send(to, message) if self._alive(now, to):
                    index = self._number(Envelope(me, to, message))
                    if self.setting.peers_in_order or index not in on_way:
                        on_way.append(index)
                case PostRead(read_id, _, owner, (src,), (dst,)):
                    reads.add(Read(side, read_id, owner, src, dst, False))
                case ToRouter(message) if side not in now.cut:
                    up.append(self._number(message))
        return now._replace(
            on_way=tuple(on_way if self.setting.peers_in_order else sorted(on_way)),
            reads=frozenset(reads),
            up=put(now.up, side, tuple(up)),
        )

    def _routes(self, now: State, label: str, method: str, *args: object) -> Step[State]:
        try:
            moved = self.routers.move(now.router, method, *args)
        except (InvariantViolation, AssertionError, KeyError) as error:
            return Step(label, now, f"{type(error).__name__}: {error}")
        return Step(label, *self._wishes(now, moved))

    def _wishes(self, now: State, moved: RouterMoved) -> tuple[State, str]:
        """What the router wants is done; and which promise it breaks, if any."""
        down, prompts, broken = [*now.down], now.prompts, ""
        received, outcome = now.received, now.outcome
        for action in moved.actions:
            match action:
                case ToWorker(to, message):
                    if isinstance(message, Submit) and len(prompts) < message.key.generation:
                        prompts = Prompts((*prompts, message.token_ids))
                    side = NAMES.index(to.worker_id)
                    if self._alive(now, to) and side not in now.cut:
                        down[side] = (*down[side], self._number(message))
                case Deliver(_, tokens, _, reason):
                    broken = broken or ("tokens after the end" if outcome else "")
                    for token in tokens:
                        broken = broken or wrong_next(prompts, received, token)
                        received = (*received, token)
                    outcome = str(reason)
                    if reason and len(received) != self.setting.max_tokens:
                        broken = broken or f"it ends after {len(received)} tokens"
                case Fail(_, error):
                    broken = broken or ("an error after the end" if outcome else "")
                    outcome = error.code
                    if not self.setting.fails or isinstance(error, ProtocolError):
                        broken = broken or f"an error to the client: {error.message}"
        after = now._replace(
            router=moved.router,
            down=tuple(down),
            prompts=prompts,
            received=received,
            outcome=outcome,
        )
        if not outcome or broken:
            return after, broken
        return self._over(after)

    def _over(self, now: State) -> tuple[State, str]:
        """The client has its end: the router must do nothing, whatever it hears from now on."""
        for side, said in enumerate(now.up):
            for index in said:
                life, message = life_of(side, now.lives[side]), self._messages[index]
                if self.routers.move(now.router, "from_worker", life, message).actions:
                    return now, f"the router acts on {shown(message)} after the end"
        after = now._replace(up=((),) * len(now.up), received=())
        return after, ""

    def _alive(self, now: State, life: Incarnation) -> bool:
        side = NAMES.index(life.worker_id)
        return now.cores[side] != CRASHED and life_of(side, now.lives[side]) == life

    def _number(self, message: object) -> int:
        index = self._index.setdefault(message, len(self._messages))
        if index == len(self._messages):
            self._messages.append(message)
        return index

    def _facts(self, now: State, side: int) -> Facts:
        return self.workers.facts[now.cores[side]]
