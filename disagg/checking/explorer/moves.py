"""A worker or the router moves, and what it wants is done to the world around it."""

from disagg.checking.explorer.exploration import Step
from disagg.checking.explorer.memory import FLIPPED, aged, with_part
from disagg.checking.explorer.routers import Routers
from disagg.checking.explorer.setting import Setting
from disagg.checking.explorer.state import (
    CRASHED,
    BlockSum,
    Client,
    Envelope,
    Facts,
    Read,
    State,
    TierCopy,
    put,
    shown,
)
from disagg.checking.explorer.tokens import Vocabulary
from disagg.checking.explorer.worker_state import stored_in
from disagg.checking.explorer.workers import Workers
from disagg.errors import InvariantViolation, ProtocolError
from disagg.kv.hashing import BlockHasher
from disagg.kv.shapes.layout import plan_layout
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.sampling import SamplingParams
from disagg.messages.session import Cancel, ResetPrefixCache
from disagg.messages.submit import Role, Submit
from disagg.routing.actions import Deliver, Fail, RouterAction, ToWorker
from disagg.scheduling.actions import (
    ClearTier,
    Drained,
    Exit,
    ReadTier,
    ToRouter,
    WorkerAction,
    WriteTier,
)
from disagg.transfer.actions import ComputeChecksums, PostRead, Send

_BROKEN = (InvariantViolation, AssertionError, KeyError)


class Moves:
    """Moves of workers and of the router under one setting.

    Attributes:
        messages: every message and envelope that was ever on its way, by number.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.names = setting.workers
        hasher = BlockHasher(b"explorer", plan_layout(setting.specs).hash_block_tokens)
        self._vocabulary = Vocabulary(hasher, setting)
        self.workers = Workers(setting, hasher, self._vocabulary)
        self.routers = Routers(setting, hasher, self._vocabulary)
        self.messages: list[object] = []
        self._numbers: dict[object, int] = {}

    def start(self) -> State:
        """Everything is asked for; nobody has heard of it."""
        sides = range(len(self.names))
        lives = [self.life(side, 0) for side in sides]
        moved = self.routers.start(lives)
        workers = [self.workers.start(life) for life in lives]
        for side in self.setting.cached_at:
            workers[side] = self._has_served(workers[side])
        empty: tuple[tuple[int, ...], ...] = ((),) * len(sides)
        clients = (Client(),) * len(self.setting.requests) if self.setting.roles else ()
        stores = tuple(
            tuple((key, self.known(key[1])) for key in stored_in(self.workers.thaw(worker)))
            for worker in workers
        )
        start = State(
            moved.router,
            tuple(workers),
            (0,) * len(sides),
            up=empty,
            down=empty,
            stores=stores if self.setting.tier else (),
            clients=clients,
        )
        after, broken = self._ordered(start, moved.actions)
        assert not broken, broken
        return after

    def _has_served(self, worker: int) -> int:
        """It has served the first prompt alone, before anything else."""
        prompt, sampling = self.setting.requests[0].prompt, SamplingParams(max_tokens=1)
        earlier = Submit(RequestKey("h", 1), Role.LOCAL, prompt, (), b"", sampling)
        worker = self.workers.move(worker, "on_router_message", 0, earlier).worker
        while self.workers.facts[worker].running is not None:
            worker = self.workers.move(worker, "ends").worker
        return worker

    # -- who is who ---------------------------------------------------------------------------

    def life(self, side: int, number: int) -> Incarnation:
        """The n-th life of a worker."""
        return Incarnation(self.names[side], f"{self.names[side][0].upper()}{number}")

    def life_of(self, now: State, side: int) -> Incarnation:
        """A worker's present life."""
        return self.life(side, now.lives[side])

    def facts(self, now: State, side: int) -> Facts:
        """Of a worker that lives."""
        return self.workers.facts[now.workers[side]]

    def is_over(self, now: State) -> bool:
        """Every client of the router's core has its end; nothing goes wrong after that."""
        return bool(now.clients) and all(client.outcome for client in now.clients)

    def _lives(self, now: State, life: Incarnation) -> bool:
        if life.worker_id not in self.names:
            return False
        side = self.names.index(life.worker_id)
        return now.workers[side] >= 0 and self.life_of(now, side) == life

    def known(self, value: bytes) -> str:
        """What a block must contain that is kept under a chain value."""
        return self._vocabulary.contents[value]

    # -- workers ------------------------------------------------------------------------------

    def does(
        self, now: State, side: int, label: str, method: str, *args: object, broken: str = ""
    ) -> Step[State]:
        """A worker moves, as `Workers.move` says, and what it wants is done."""
        label = f"{self.names[side]}: {label}"
        try:
            moved = self.workers.move(now.workers[side], method, *args)
        except _BROKEN as error:
            return Step(label, now, f"{type(error).__name__}: {error}")
        after = now._replace(workers=put(now.workers, side, moved.worker))
        state, wrong = self._perform(after, side, moved.actions)
        if state.workers[side] == CRASHED:
            label += ", and exits"
        return Step(label, state, broken or moved.broken or wrong)

    def lands(
        self, now: State, read: Read, rank: int, *, flipped: bool = False
    ) -> tuple[State, str]:
        """A rank's READ copies its part of a block, or other bytes; and what is wrong with that."""
        memory, num_ranks = self.workers.memory, self.setting.num_ranks
        source = FLIPPED if flipped else memory[now.workers[read.owner]][read.src]
        old = memory[now.workers[read.side]][read.dst]
        content = with_part(old, rank, num_ranks, source)
        held = read.dst in self.facts(now, read.side).inbound_held
        worker = self.workers.write(now.workers[read.side], read.dst, content)
        broken = "" if held else f"a READ lands in block {read.dst}, held by no transfer"
        return now._replace(workers=put(now.workers, read.side, worker)), broken

    def gone(self, now: State, side: int, how: int) -> State:
        """A worker has crashed or vanished, with its memory and all streams to it."""
        life = self.life_of(now, side)
        return now._replace(
            workers=put(now.workers, side, how),
            down=put(now.down, side, ()),
            cut=tuple(one for one in now.cut if one != side),
            on_way=tuple(
                index
                for index in now.on_way
                if self.envelope(index).to != life or not self.setting.checks_addressee
            ),
            reads=tuple(read for read in now.reads if read.side != side),
            sums=tuple(one for one in now.sums if one.side != side),
            copies=tuple(copy for copy in now.copies if copy.side != side),
            clears=tuple(one for one in now.clears if one != side),
        )

    def resets(self, now: State) -> State:
        """All that was computed so far is old; every worker will hear that it must forget it."""
        number = now.faults.resets + 1
        order, down = self.number(ResetPrefixCache(number)), list(now.down)
        for side, worker in enumerate(now.workers):
            if worker >= 0 and side not in now.cut:
                down[side] = self._queued(down[side], order)
        return now._replace(
            workers=tuple(self.workers.age(one) if one >= 0 else one for one in now.workers),
            stores=tuple(tuple((key, aged(one)) for key, one in store) for store in now.stores),
            copies=tuple(sorted(one._replace(content=aged(one.content)) for one in now.copies)),
            down=tuple(down),
            faults=now.faults._replace(resets=number),
        )

    def _perform(
        self, now: State, side: int, actions: tuple[WorkerAction, ...]
    ) -> tuple[State, str]:
        in_order = self.setting.delivery == "in order"
        me, on_way, reads = self.life_of(now, side), list(now.on_way), list(now.reads)
        said, copies, clears, exits = [], list(now.copies), list(now.clears), False
        sums = list(now.sums)
        for action in actions:
            match action:
                case Send(to, message) if self._lives(now, to) or not self.setting.checks_addressee:
                    index = self.number(Envelope(me, to, message))
                    if in_order or index not in on_way:
                        on_way.append(index)
                case PostRead(read_id, _, owner, (src,), (dst,)):
                    from_ = self.names.index(owner.worker_id)
                    life = int(owner.epoch[1:])
                    none = (False,) * self.setting.num_ranks
                    reads.append(Read(side, read_id, from_, life, src, dst, none, none))
                case ComputeChecksums(request_id, (block,)):
                    sums.append(BlockSum(side, request_id, block))
                case WriteTier(copy_id, _, ((key, block),)):
                    copies.append(TierCopy(side, copy_id, True, key, block))
                case ReadTier(copy_id, _, ((key, block),)):
                    copies.append(TierCopy(side, copy_id, False, key, block))
                case ClearTier():
                    clears.append(side)
                case ToRouter(message) if side not in now.cut:
                    said.append(message)
                case Exit() | Drained():
                    exits = True
        after = now._replace(
            on_way=tuple(on_way if in_order else sorted(on_way)),
            reads=tuple(sorted(reads)),
            sums=tuple(sorted(sums)),
            copies=tuple(sorted(copies)),
            clears=tuple(sorted(clears)),
        )
        broken = ""
        for message in said:
            if self.setting.roles:
                up = (*after.up[side], self.number(message))
                after = after._replace(up=put(after.up, side, up))
            else:
                heard = self.routes(after, "", "from_worker", me, message)
                after, broken = heard.state, broken or heard.broken
        if exits:
            faults = after.faults._replace(crashes=(*after.faults.crashes, side))
            after = self.gone(after._replace(faults=faults), side, CRASHED)
        if self.setting.roles and self.is_over(after):
            after, wrong = self._at_rest(after)
            broken = broken or wrong
        return after, broken

    # -- the router ---------------------------------------------------------------------------

    def routes(self, now: State, label: str, method: str, *args: object) -> Step[State]:
        """Call a method of the router."""
        try:
            moved = self.routers.move(now.router, method, *args)
        except _BROKEN as error:
            return Step(label, now, f"{type(error).__name__}: {error}")
        return Step(label, *self._ordered(now._replace(router=moved.router), moved.actions))

    def _ordered(self, now: State, actions: tuple[RouterAction, ...]) -> tuple[State, str]:
        """What the router wants is done; and which promise it breaks, if any."""
        down, clients, broken = list(now.down), now.clients, ""
        for action in actions:
            match action:
                case ToWorker(to, message):
                    side = self.names.index(to.worker_id)
                    if self._lives(now, to) and side not in now.cut:
                        down[side] = self._queued(down[side], self.number(message))
                case Deliver(name, tokens, _, reason):
                    index = "rstuv".index(name)
                    client, wrong = self._delivered(index, clients[index], tokens, str(reason))
                    clients, broken = put(clients, index, client), broken or wrong
                case Fail(name, error):
                    index = "rstuv".index(name)
                    wrong = "an error after the end" if clients[index].outcome else ""
                    clients = put(clients, index, clients[index]._replace(outcome=error.code))
                    if not self.setting.error_allowed or isinstance(error, ProtocolError):
                        wrong = wrong or f"an error to the client: {error.message}"
                    broken = broken or wrong
        after = now._replace(down=tuple(down), clients=clients)
        if broken or not self.is_over(after):
            return after, broken
        return self._at_rest(after)

    def _queued(self, queue: tuple[int, ...], number: int) -> tuple[int, ...]:
        """A session with an order behind the others; the scripted router's cancels come last."""
        if self.setting.roles:
            return (*queue, number)
        queued = ((isinstance(self.messages[one], Cancel), one) for one in (*queue, number))
        return tuple(one for _, one in sorted(queued))

    def _delivered(
        self, index: int, client: Client, tokens: tuple[int, ...], reason: str
    ) -> tuple[Client, str]:
        request, received = self.setting.requests[index], client.received
        broken = "tokens after the end" if client.outcome else ""
        for token in tokens:
            broken = broken or self._vocabulary.wrong_next(request.prompt, received, token)
            received = (*received, token)
        if reason and len(received) != request.max_tokens:
            broken = broken or f"it ends after {len(received)} tokens"
        return Client(received, reason), broken

    def _at_rest(self, now: State) -> tuple[State, str]:
        """Every client has its end: the router must do nothing, whatever it hears from now on."""
        for side, said in enumerate(now.up):
            for index in said:
                life, message = self.life_of(now, side), self.messages[index]
                if self.routers.move(now.router, "from_worker", life, message).actions:
                    return now, f"the router acts on {shown(message)} after the end"
        clients = tuple(client._replace(received=()) for client in now.clients)
        return now._replace(up=((),) * len(now.up), clients=clients), ""

    def envelope(self, index: int) -> Envelope:
        """One that is on its way."""
        envelope = self.messages[index]
        assert isinstance(envelope, Envelope)
        return envelope

    def number(self, message: object) -> int:
        """A number for a message on its way."""
        index = self._numbers.setdefault(message, len(self.messages))
        if index == len(self.messages):
            self.messages.append(message)
        return index
