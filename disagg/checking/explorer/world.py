"""Whole workers, a router and a hostile network: everything that can happen under one setting.

The workers are production cores, and so is the router where the setting gives them roles. Steps
take time and leave half-written blocks until they end; READs land at any moment; whatever is free,
or taken anew, is overwritten at once. A session with the router's core keeps its order, both ways,
and is late by any time; of what a worker has said that crashed, or whose session broke, the router
hears any beginning. The scripted router hears everything at once.
"""

from collections.abc import Iterator

from disagg.checking.explorer.checksums import checksum_steps
from disagg.checking.explorer.drains import drain_steps
from disagg.checking.explorer.exploration import Exploration, Goal, Step, explore
from disagg.checking.explorer.moves import Moves
from disagg.checking.explorer.rounds import rounds
from disagg.checking.explorer.router_losses import router_steps
from disagg.checking.explorer.setting import Setting
from disagg.checking.explorer.stalls import stall_steps
from disagg.checking.explorer.state import (
    ASK_TIMEOUT_MS,
    CRASHED,
    LEASE_TTL_MS,
    RESERVATION_TTL_MS,
    STRANGER,
    TAKE_OVER_MS,
    VANISHED,
    Facts,
    Read,
    State,
    put,
    shown,
)
from disagg.checking.explorer.tiers import tier_steps
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import AskLease, PeerMessage, TakeOver
from disagg.messages.session import Cancel, ResetPrefixCache
from disagg.messages.submit import Submit


class World:
    """All steps of the world under one setting."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.moves = Moves(setting)
        self._names = setting.workers
        self._does, self._routes = self.moves.does, self.moves.routes

    def explore(self, states_max: int = 3_000_000) -> Exploration:
        """Visit everything."""
        goals = [Goal("good end", self._rests)]
        if self.setting.served:
            goals.append(Goal("served", self._all_served, self._has_passes))
        return explore(self.start(), self.steps, goals=goals, states_max=states_max)

    def start(self) -> State:
        """Nothing has happened yet, but the requests."""
        start = self.moves.start()
        if self.setting.delays:
            start = start._replace(waits=(0,) * len(start.workers))
        for side in range(len(start.workers)) if self.setting.at_once else ():
            while start.down[side]:
                start = next(self._order_steps(start, side)).state
        return start

    # -- good ends ----------------------------------------------------------------------------

    def _rests(self, now: State) -> bool:
        """Nothing is held or goes on, and every client of the router's core has its end."""
        under_way = now.reads or now.copies or now.clears or now.sums
        if under_way or (now.clients and not self.moves.is_over(now)):
            return False
        facts = self.moves.workers.facts
        if VANISHED in now.workers:
            # Only the router, which is not told, could end what waits without holding anything.
            return all(facts[one].holds_nothing for one in now.workers if one >= 0)
        return all(facts[one].at_rest for one in now.workers if one >= 0)

    def _all_served(self, now: State) -> bool:
        served = self.moves.routers.served[now.router]
        return served and not any(now.down) and self._rests(now)

    def _has_passes(self, now: State) -> bool:
        facts = self.moves.workers.facts
        served = self.moves.routers.served[now.router]
        return served and all(facts[one].has_passes for one in now.workers)

    # -- what happens next --------------------------------------------------------------------

    def steps(self, now: State) -> Iterator[Step[State]]:
        """Everything that can happen next."""
        if self.setting.delays:
            yield from rounds(self.moves, now)
            return
        over = self.moves.is_over(now)
        for side, worker in enumerate(now.workers):
            yield from self._hearing_steps(now, side)
            yield from self._order_steps(now, side)
            if worker >= 0:
                facts = self.moves.facts(now, side)
                yield from self._worker_steps(now, side, facts)
                yield from self._waiting_steps(now, side, facts, over)
                yield from self._losing_steps(now, side, facts)
                if not over:
                    yield from self._fault_steps(now, side, facts)
                yield from self._session_steps(now, side, facts, over)
            elif worker == CRASHED:
                yield from self._crashed_steps(now, side, over)
        yield from self._message_steps(now)
        yield from router_steps(self.moves, now)
        yield from drain_steps(self.moves, now)
        yield from stall_steps(self.moves, now)
        for read in now.reads:
            yield from self._read_steps(now, read, over)
        yield from checksum_steps(self.moves, now)
        yield from tier_steps(self.moves, now)
        if not over and len(now.faults.cancels) < self.setting.cancels:
            yield from self._cancel_steps(now)

    # -- sessions -----------------------------------------------------------------------------

    def _hearing_steps(self, now: State, side: int) -> Iterator[Step[State]]:
        if now.up[side]:
            first, *rest = now.up[side]
            message, life = self.moves.messages[first], self.moves.life_of(now, side)
            after = now._replace(up=put(now.up, side, tuple(rest)))
            label = f"router: hears of {self._names[side]} {shown(message)}"
            yield self._routes(after, label, "from_worker", life, message)

    def _order_steps(self, now: State, side: int) -> Iterator[Step[State]]:
        queue = now.down[side]
        submitted: list[RequestKey | None] = []  # of all routers: each has a stream of its own
        for place, index in enumerate(queue):
            order = self.moves.messages[index]
            assert isinstance(order, Submit | Cancel | ResetPrefixCache)
            if self.setting.roles:
                waits = place > 0
            elif isinstance(order, Cancel):
                waits = order.key in submitted and not self.setting.cancel_overtakes
            else:
                key = order.key if isinstance(order, Submit) else None
                before = [one for one in submitted if not (one and key) or one.router == key.router]
                waits = bool(before) and not self.setting.any_order
                submitted.append(key)
            if not waits:
                after = now._replace(down=put(now.down, side, queue[:place] + queue[place + 1 :]))
                label = f"hears {shown(order)}"
                yield self._does(after, side, label, "on_router_message", 0, order)

    def _session_steps(
        self, now: State, side: int, facts: Facts, over: bool
    ) -> Iterator[Step[State]]:
        """The session of a worker that lives has broken: both notice, then there is another."""
        if side not in now.cut:
            return
        name, life = self._names[side], facts.me
        if facts.keys or now.down[side]:
            after = now._replace(down=put(now.down, side, ()))
            yield self._does(after, side, "loses the router", "on_router_lost", 0)
        if life in self.moves.routers.known[now.router]:
            after = now._replace(up=put(now.up, side, ()))
            yield self._routes(after, f"router: loses {name}", "session_lost", life)
        elif not over and self.setting.roles:
            label = "has a new session"
            said = now.down[side] if self.setting.late_sessions else ()
            ended = self._does(now, side, label, "on_router_lost", 0)
            after = ended.state._replace(
                down=put(now.down, side, said), cut=tuple(one for one in now.cut if one != side)
            )
            joined = self._joins(after, f"{name}: {label}", life, side)
            yield Step(joined.label, joined.state, ended.broken or joined.broken)

    def _joins(self, now: State, label: str, life: Incarnation, side: int) -> Step[State]:
        role = self.setting.roles[side] if self.setting.roles else ""
        return self._routes(now, label, "join", life, role)

    def _crashed_steps(self, now: State, side: int, over: bool) -> Iterator[Step[State]]:
        name, life = self._names[side], self.moves.life_of(now, side)
        is_known = life in self.moves.routers.known[now.router]
        if is_known:
            after = now._replace(up=put(now.up, side, ()))
            yield self._routes(after, f"router: loses {name}", "session_lost", life)
        # The router takes nobody in under the id of one that it believes alive.
        is_refused = is_known and bool(self.setting.roles)
        if self.setting.returns and not over and not is_refused:
            again = self.moves.life(side, now.lives[side] + 1)
            after = now._replace(
                workers=put(now.workers, side, self.moves.workers.start(again)),
                lives=put(now.lives, side, now.lives[side] + 1),
                up=put(now.up, side, ()),
            )
            yield self._joins(after, f"{name} is back", again, side)

    def _cancel_steps(self, now: State) -> Iterator[Step[State]]:
        for index, name in enumerate("rstuv"[: len(self.setting.requests)]):
            ended = bool(now.clients) and bool(now.clients[index].outcome)
            if index in now.faults.cancels or ended:
                continue
            faults = now.faults._replace(cancels=tuple(sorted((*now.faults.cancels, index))))
            after = now._replace(faults=faults)
            if now.clients:
                client = now.clients[index]._replace(outcome="cancelled")
                after = after._replace(clients=put(now.clients, index, client))
            step = self._routes(after, f"the client of {name} goes away", "cancel", name, "gone")
            if step.state.router != now.router:  # or it had ended already
                yield step

    # -- workers ------------------------------------------------------------------------------

    def _worker_steps(self, now: State, side: int, facts: Facts) -> Iterator[Step[State]]:
        setting = self.setting
        again = setting.repeats and (setting.delivery == "repeated" or setting.losses > 0)
        for move in facts.own_moves:
            if now.workers[1 - side] >= 0:
                yield self._does(now, side, f"{move}s", move, 0, self.moves.life_of(now, 1 - side))
        if facts.running is not None:
            keys = ", ".join(part.key.request_id for part in facts.running.step.slices)
            yield self._does(now, side, f"a step of {keys} ends", "ends")
        if facts.backing_off or (again and (facts.repeats or facts.asking)):
            yield self._does(now, side, "repeats or retries", "tick", 0)
        if facts.orphans:
            yield self._does(now, side, "nobody took it over", "tick", TAKE_OVER_MS)

    def _fault_steps(self, now: State, side: int, facts: Facts) -> Iterator[Step[State]]:
        name, setting, faults = self._names[side], self.setting, now.faults
        if facts.running is not None and faults.step_errors < setting.step_errors:
            after = now._replace(faults=faults._replace(step_errors=faults.step_errors + 1))
            yield self._does(after, side, "a step fails", "fails")
        may_preempt = facts.running is not None and not facts.queued and facts.preemptible
        if may_preempt and faults.preemptions < setting.preemptions:
            after = now._replace(faults=faults._replace(preemptions=faults.preemptions + 1))
            label = "a step ends and a prefill is preempted"
            yield self._does(after, side, label, "ends_preempted")
        if facts.cached and faults.evictions < setting.evictions:
            after = now._replace(faults=faults._replace(evictions=faults.evictions + 1))
            yield self._does(after, side, "everything free is evicted", "evict")
        if side in setting.crashes and side not in faults.crashes:
            after = self.moves.gone(now, side, CRASHED)
            faults = faults._replace(crashes=(*faults.crashes, side))
            yield Step(f"{name} crashes", after._replace(faults=faults))
        if side in setting.cuts and side not in (*now.cut, *now.faults.cuts):
            faults = now.faults._replace(cuts=(*now.faults.cuts, side))
            after = now._replace(cut=(*now.cut, side), faults=faults)
            yield Step(f"{name}'s session breaks", after)
        if side in setting.vanishes and VANISHED not in now.workers:
            yield Step(f"{name} vanishes", self.moves.gone(now, side, VANISHED))

    def _waiting_steps(
        self, now: State, side: int, facts: Facts, over: bool
    ) -> Iterator[Step[State]]:
        setting, faults = self.setting, now.faults
        too_early = setting.late_time_outs and not (faults.losses or VANISHED in now.workers)
        num, num_max = faults.time_outs, setting.num_time_outs
        if over or too_early or (num_max is not None and num >= num_max):
            return
        after = now
        if num_max is not None:
            after = now._replace(faults=faults._replace(time_outs=num + 1))
        kinds = setting.time_outs
        if ("request" in kinds and facts.asking) or ("read" in kinds and facts.reading):
            yield self._does(after, side, "a request or READ times out", "tick", ASK_TIMEOUT_MS)
        if "lease" in kinds and facts.num_leases:
            yield self._does(after, side, "its leases expire", "tick", LEASE_TTL_MS)
        if "reservation" in kinds and facts.granted:
            yield self._does(after, side, "reservations expire", "tick", RESERVATION_TTL_MS)

    def _losing_steps(self, now: State, side: int, facts: Facts) -> Iterator[Step[State]]:
        if not (facts.keys or facts.num_leases or facts.lending):
            return
        lost = [(other, self.moves.life(other, 0)) for other in now.faults.crashes]
        for pair in self.setting.unlinked:
            lost += [(other, self.moves.life_of(now, other)) for other in pair if side in pair]
        for other, life in lost:
            if other == side or (now.workers[other] == VANISHED):
                continue
            after = now
            if self.setting.delivery == "in order":  # their stream has ended
                ended = (life, facts.me)
                on_way = (i for i in now.on_way if self.moves.envelope(i)[:2] != ended)
                after = now._replace(on_way=tuple(on_way))
            label = f"loses {self._names[other]}"
            yield self._does(after, side, label, "on_peer_lost", 0, life)

    # -- READs and messages -------------------------------------------------------------------

    def _read_steps(self, now: State, read: Read, over: bool) -> Iterator[Step[State]]:
        setting, errors = self.setting, now.faults.read_errors
        alive = now.workers[read.owner] >= 0 and now.lives[read.owner] == read.owner_life
        others = tuple(one for one in now.reads if one != read)
        for rank in range(setting.num_ranks):
            if read.ended[rank]:
                continue
            label = f"READ {read.read_id}" + (f", rank {rank}" if setting.num_ranks > 1 else "")
            done = now._replace(reads=others)
            if read.landed[rank]:
                yield self._ends_read(done, f"{label} is DONE", read, rank, "")
            elif alive:
                yield self._lands(done, label, read, rank, flipped=False)
                if now.faults.bit_flips < setting.bit_flips and not over:
                    faults = now.faults._replace(bit_flips=now.faults.bit_flips + 1)
                    flips = done._replace(faults=faults)
                    yield self._lands(flips, label, read, rank, flipped=True)
            if not alive or (errors < setting.read_errors and not over):
                faults = now.faults._replace(read_errors=errors + alive)
                after_error = now._replace(reads=others, faults=faults)
                yield self._ends_read(after_error, f"{label} fails", read, rank, "error")

    def _lands(
        self, now: State, label: str, read: Read, rank: int, *, flipped: bool
    ) -> Step[State]:
        """A rank's READ writes its part of a block, and where READs are whole it ends with that."""
        landed, broken = self.moves.lands(now, read, rank, flipped=flipped)
        if self.setting.whole_reads:
            label += " brings flipped bits" if flipped else " is DONE"
            return self._ends_read(landed, label, read, rank, "", broken)
        reads = (*now.reads, read._replace(landed=put(read.landed, rank, True)))
        content = self.moves.workers.memory[landed.workers[read.side]][read.dst]
        lands = f"{self._names[read.side]}: {label} lands: {content!r} in {read.dst}"
        return Step(lands, landed._replace(reads=tuple(sorted(reads))), broken)

    def _ends_read(
        self, now: State, label: str, read: Read, rank: int, error: str, broken: str = ""
    ) -> Step[State]:
        """A rank's handle is terminal; the worker hears of it when all are."""
        if self.setting.any_error:
            error = read.error or error
        ended = read._replace(ended=put(read.ended, rank, True), error=error)
        due = sum(ended.ended) >= (self.setting.waits_for or self.setting.num_ranks)
        reports = due and not read.reported
        if not all(ended.ended):
            ended = ended._replace(reported=read.reported or reports)
            now = now._replace(reads=tuple(sorted((*now.reads, ended))))
        if not reports:
            return Step(f"{self._names[read.side]}: {label}", now, broken)
        done = ("on_read_done", 0, read.read_id, ended.error)
        return self._does(now, read.side, label, *done, broken=broken)

    def _message_steps(self, now: State) -> Iterator[Step[State]]:
        setting, seen = self.setting, set()
        for place, index in enumerate(now.on_way):
            sender, to, message = self.moves.envelope(index)
            side = self._names.index(to.worker_id)
            if now.workers[side] < 0:  # where the addressee is not checked
                continue
            if setting.delivery == "in order" and (sender, to) in seen:
                continue
            seen.add((sender, to))
            rest = now._replace(on_way=now.on_way[:place] + now.on_way[place + 1 :])
            after = now if setting.delivery == "repeated" else rest
            label = f"hears {shown(message)}"
            yield self._does(after, side, label, "on_peer_message", 0, sender, message)
            if now.faults.losses < setting.losses:
                faults = now.faults._replace(losses=now.faults.losses + 1)
                yield Step(f"lost: {shown(message)}", rest._replace(faults=faults))
            if setting.wrong_epochs:
                yield from self._stranger_steps(now, side, sender.worker_id, message)
        side, name = now.faults.stranger
        if name and side >= 0 and now.workers[side] >= 0:
            after = now._replace(faults=now.faults._replace(stranger=(-1, name)))
            gone = ("on_peer_lost", 0, Incarnation(name, STRANGER))
            yield self._does(after, side, f"loses the stranger {name}", *gone)

    def _stranger_steps(
        self, now: State, side: int, name: str, message: PeerMessage
    ) -> Iterator[Step[State]]:
        """The same message from another life of its sender, which must change nothing."""
        stranger, known = Incarnation(name, STRANGER), now.faults.stranger
        label = f"hears from a stranger {shown(message)}"
        asks = isinstance(message, AskLease | TakeOver)
        if known == (side, name) or (asks and not known[1]):
            # What it does to itself is its own affair; the promises to all others hold.
            after = now._replace(faults=now.faults._replace(stranger=(side, name)))
            yield self._does(after, side, label, "on_peer_message", 0, stranger, message)
        elif not asks and self.moves.workers.minds(now.workers[side], stranger, message):
            label = f"{self._names[side]}: {label}"
            yield Step(label, now, "a stranger's message did something")
