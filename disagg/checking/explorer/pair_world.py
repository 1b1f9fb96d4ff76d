"""Two whole workers, a router and a hostile network: everything that can happen to a hand-over.

The workers are production cores (scheduler, reservations, leases, inbound transfers, coordinator,
block pool). Steps take time, READs land at any moment, time-outs fire at any moment. Once sent, a
message may arrive at any later time, any number of times or never; with ``repeats`` off at most
once, and with ``in_order`` exactly once and in order.
"""

from collections.abc import Iterator
from typing import NamedTuple

from disagg.checking.explorer.exploration import Exploration, Step, explore
from disagg.checking.explorer.on_way import Envelope, Read, put
from disagg.checking.explorer.pair_memory import NOTHING, Memory, after_move, land
from disagg.checking.explorer.pair_setting import NAMES, OUTPUT, SIDES, PairSetting
from disagg.checking.explorer.pair_worker import (
    ASK_TIMEOUT_MS,
    LEASE_TTL_MS,
    RESERVATION_TTL_MS,
    Facts,
    Moved,
    Workers,
)
from disagg.errors import InvariantViolation
from disagg.kv.hashing import BlockHasher
from disagg.kv.shapes.layout import plan_layout
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import PeerMessage
from disagg.messages.sampling import SampledToken, SamplingParams
from disagg.messages.session import Cancel, PartEnded, PeerAddress, Role, Submit
from disagg.scheduling.actions import ToRouter
from disagg.scheduling.step import StepResult
from disagg.transfer.actions import PostRead, Send


class Faults(NamedTuple):
    """How much has gone wrong so far."""

    cancels: int = 0
    losses: int = 0
    preemptions: int = 0
    evictions: int = 0
    step_errors: int = 0
    read_errors: int = 0
    restarts: tuple[int, int] = (0, 0)
    gone: int = -1
    """The side that has vanished."""


class State(NamedTuple):
    """Everything that can differ between two moments."""

    cores: tuple[int, int]
    memory: tuple[Memory, Memory]
    told: tuple[tuple[int, int], ...]
    """Per request and side: 0 nothing, 1 submitted, 2 both, 3 cancelled before the submit."""
    over: frozenset[RequestKey] = frozenset()
    """What the router has ended."""
    on_way: tuple[int, ...] = ()
    """Sorted, or in order of sending."""
    reads: frozenset[Read] = frozenset()
    faults: Faults = Faults()


class PairWorld:
    """All steps of the world under one setting."""

    def __init__(self, setting: PairSetting) -> None:
        self.setting = setting
        layout = plan_layout(setting.specs)
        self._block_tokens = layout.hash_block_tokens
        hasher = BlockHasher(b"explorer", self._block_tokens)
        hashes: list[bytes] = []
        hasher.extend(hashes, (*setting.prompt, OUTPUT, OUTPUT))
        self.workers = Workers(
            layout,
            hasher,
            num_blocks=setting.num_blocks,
            passes_max=setting.passes_max,
            share=setting.share,
            mutate=setting.mutate,
            positions={value: position for position, value in enumerate(hashes)},
        )
        self.keys = [RequestKey(name, 1) for name in "rst"[: setting.num_requests]]
        self._messages: list[Envelope] = []
        self._index: dict[Envelope, int] = {}

    def explore(self, states_max: int = 3_000_000) -> Exploration:
        """Visit everything; goals are the states in which nothing is held or goes on."""
        nothing = (NOTHING,) * self.setting.num_blocks
        cores = (self.workers.start(_life(0, 0)), self.workers.start(_life(1, 0)))
        start = State(cores, (nothing, nothing), ((0, 0),) * len(self.keys))
        return explore(start, self.steps, is_goal=self._is_goal, states_max=states_max)

    def _is_goal(self, state: State) -> bool:
        gone = state.faults.gone
        if gone < 0:
            return not state.reads and all(self.workers.facts[c].at_rest for c in state.cores)
        # Only the router, which is not told here, could end what waits without holding anything.
        return not state.reads and self._facts(state, 1 - gone).holds_nothing

    def steps(self, now: State) -> Iterator[Step[State]]:
        """Everything that can happen next."""
        for side in SIDES:
            if side != now.faults.gone:
                yield from self._router_steps(now, side)
                yield from self._worker_steps(now, side)
                yield from self._restart_steps(now, side)
            if side in self.setting.vanishes and now.faults.gone < 0:
                after = now._replace(
                    faults=now.faults._replace(gone=side),
                    reads=now.reads if side == 0 else frozenset(),
                )
                yield Step(f"{NAMES[side]} vanishes", after)
        yield from self._cancel_steps(now)
        yield from self._message_steps(now)
        for read in sorted(now.reads, key=lambda read: (read.read_id, read.owner.epoch)):
            yield from self._read_steps(now, read)

    # -- what the router does -----------------------------------------------------------------

    def _router_steps(self, now: State, side: int) -> Iterator[Step[State]]:
        for index, key in enumerate(self.keys):
            told = now.told[index][side]
            if told in (0, 3):
                submit = self._submit(key, side)
                after = _told(now, index, side, 2 if told else 1)
                yield self._does(after, side, "submit arrives", "on_router_message", 0, submit)
            if key in now.over and (told == 1 or (told == 0 and self.setting.cancel_overtakes)):
                cancel = Cancel(key, "over")
                after = _told(now, index, side, 2 if told else 3)
                yield self._does(after, side, "cancel arrives", "on_router_message", 0, cancel)

    def _cancel_steps(self, now: State) -> Iterator[Step[State]]:
        if now.faults.cancels < self.setting.cancels:
            for key in self.keys:
                if key not in now.over:
                    faults = now.faults._replace(cancels=now.faults.cancels + 1)
                    after = now._replace(over=now.over | {key}, faults=faults)
                    yield Step(f"the client of {key.request_id} goes away", after)

    def _submit(self, key: RequestKey, side: int) -> Submit:
        peer = PeerAddress(_life(1 - side, 0), "")
        role = (Role.PREFILL, Role.DECODE)[side]
        return Submit(key, role, self.setting.prompt, (), b"", SamplingParams(max_tokens=2), peer)

    # -- what happens inside a worker ---------------------------------------------------------

    def _worker_steps(self, now: State, side: int) -> Iterator[Step[State]]:
        facts, setting, faults = self._facts(now, side), self.setting, now.faults
        if facts.step is not None:
            yield self._step_done(now, side)
            if faults.step_errors < setting.step_errors:
                failed = StepResult(facts.step.step_id, error="failed")
                after = now._replace(faults=faults._replace(step_errors=faults.step_errors + 1))
                yield self._does(after, side, "a step fails", "on_step_done", 0, failed)
        if facts.backing_off or (facts.repeats and (setting.repeats or setting.losses)):
            yield self._does(now, side, "asks or retries", "tick", 0)
        if setting.time_outs or (setting.late_time_outs and (faults.losses or faults.gone >= 0)):
            if facts.asking or facts.reading:
                yield self._does(now, side, "a question or READ times out", "tick", ASK_TIMEOUT_MS)
            if facts.num_leases:
                yield self._does(now, side, "its leases expire", "tick", LEASE_TTL_MS)
            if facts.granted:
                yield self._does(now, side, "reservations expire", "tick", RESERVATION_TTL_MS)
        if facts.preemptible and faults.preemptions < setting.preemptions:
            after = now._replace(faults=faults._replace(preemptions=faults.preemptions + 1))
            yield self._step_done(after, side, "and the prefill is preempted", "preempt")
        if facts.cached and faults.evictions < setting.evictions:
            after = now._replace(faults=faults._replace(evictions=faults.evictions + 1))
            yield self._does(after, side, "everything free is evicted", "evict")

    def _step_done(
        self, now: State, side: int, and_then: str = "", method: str = "on_step_done"
    ) -> Step[State]:
        step = self._facts(now, side).step
        assert step is not None
        memory, broken = land(step, now.memory[side], block_tokens=self._block_tokens)
        samples = tuple(SampledToken(OUTPUT) if part.sampling else None for part in step.slices)
        after = now._replace(memory=put(now.memory, side, memory))
        result = StepResult(step.step_id, samples)
        label = f"a step ends {and_then}".rstrip()
        return self._does(after, side, label, method, 0, result, broken=broken)

    def _restart_steps(self, now: State, side: int) -> Iterator[Step[State]]:
        lives = now.faults.restarts
        if lives[side] < self.setting.restarts[side]:
            fresh = self.workers.start(_life(side, lives[side] + 1))
            nothing = (NOTHING,) * self.setting.num_blocks
            after = now._replace(
                cores=put(now.cores, side, fresh),
                memory=put(now.memory, side, nothing),
                reads=now.reads if side == 0 else frozenset(),
                # Streams to the old life have ended, the router's among them.
                on_way=tuple(i for i in now.on_way if self._messages[i].to != _life(side, 0)),
                told=tuple(put(told, side, 2) for told in now.told),
                over=frozenset(self.keys),
                faults=now.faults._replace(restarts=put(lives, side, lives[side] + 1)),
            )
            yield Step(f"{NAMES[side]} restarts", after)
        other = 1 - side
        if lives[other] and self._facts(now, side).keys:
            old = _life(other, 0)
            yield self._does(now, side, "its peer is lost", "on_peer_lost", 0, old)

    # -- READs and messages -------------------------------------------------------------------

    def _read_steps(self, now: State, read: Read) -> Iterator[Step[State]]:
        others = now.reads - {read}
        alive = read.owner == self._facts(now, 0).me and now.faults.gone != 0
        if not read.landed and alive:
            content = now.memory[0][read.src]
            held = read.dst in self._facts(now, 1).inbound_held
            memory = put(now.memory[1], read.dst, content)
            after = now._replace(
                memory=put(now.memory, 1, memory), reads=others | {read._replace(landed=True)}
            )
            broken = "" if held else f"a READ lands in block {read.dst}, held by no transfer"
            yield Step(f"READ {read.read_id} lands: {content!r} in {read.dst}", after, broken)
        after = now._replace(reads=others)
        done = ("on_read_done", 0, read.read_id)
        if read.landed:
            yield self._does(after, 1, f"READ {read.read_id} is DONE", *done, "")
        if not alive or now.faults.read_errors < self.setting.read_errors:
            faults = now.faults._replace(read_errors=now.faults.read_errors + alive)
            after = after._replace(faults=faults)
            yield self._does(after, 1, f"READ {read.read_id} fails", *done, "error")

    def _message_steps(self, now: State) -> Iterator[Step[State]]:
        in_order, seen = self.setting.in_order, set()
        for place, index in enumerate(now.on_way):
            sender, to, message = self._messages[index]
            side = 0 if to.worker_id == NAMES[0] else 1
            if (in_order and side in seen) or side == now.faults.gone:
                continue
            seen.add(side)
            rest = now.on_way[:place] + now.on_way[place + 1 :]
            after = now._replace(on_way=rest) if in_order or not self.setting.repeats else now
            call = ("on_peer_message", 0, sender, message)
            yield self._does(after, side, f"hears {_shown(message)}", *call)
            if now.faults.losses < self.setting.losses:
                faults = now.faults._replace(losses=now.faults.losses + 1)
                yield Step(f"lost: {_shown(message)}", now._replace(on_way=rest, faults=faults))
            stranger = _life(1 - side, 9)
            if self.setting.wrong_epochs and self._minds(now, side, stranger, message):
                label = f"{NAMES[side]}: hears from a stranger {_shown(message)}"
                yield Step(label, now, "a stranger's message did something")

    def _minds(self, now: State, side: int, stranger: Incarnation, message: PeerMessage) -> bool:
        return self.workers.minds(now.cores[side], stranger, message)

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
        memory, wrong = after_move(
            now.memory[side], before, after, moved.launched, block_tokens=self._block_tokens
        )
        broken = broken or wrong
        state = now._replace(
            cores=put(now.cores, side, moved.core), memory=put(now.memory, side, memory)
        )
        return Step(label, self._perform(state, side, moved), broken)

    def _perform(self, now: State, side: int, moved: Moved) -> State:
        me, peer = self._facts(now, side).me, self._facts(now, 1 - side).me
        on_way, reads, over = list(now.on_way), set(now.reads), set(now.over)
        for action in moved.actions:
            match action:
                case Send(to, message) if to == peer:
                    index = self._number(Envelope(me, to, message))
                    if self.setting.in_order or index not in on_way:
                        on_way.append(index)
                case PostRead(read_id, _, owner, (src,), (dst,)):
                    reads.add(Read(read_id, owner, src, dst, False))
                case ToRouter(PartEnded(key)) if self.setting.echoes:
                    over.add(key)
        return now._replace(
            on_way=tuple(on_way if self.setting.in_order else sorted(on_way)),
            reads=frozenset(reads),
            over=frozenset(over),
        )

    def _number(self, envelope: Envelope) -> int:
        index = self._index.setdefault(envelope, len(self._messages))
        if index == len(self._messages):
            self._messages.append(envelope)
        return index

    def _facts(self, now: State, side: int) -> Facts:
        return self.workers.facts[now.cores[side]]


def _life(side: int, number: int) -> Incarnation:
    return Incarnation(NAMES[side], f"{NAMES[side][0].upper()}{number}")


def _told(now: State, index: int, side: int, value: int) -> State:
    return now._replace(told=put(now.told, index, put(now.told[index], side, value)))


def _shown(message: PeerMessage) -> str:
    return str(message).replace("RequestKey(request_id='r', generation=1)", "r")
