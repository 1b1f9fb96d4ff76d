"""Two workers that prefill for each other and do everything at the same moment.

The one schedule in which back-off matters: in each round every message sent in the last one
arrives, steps and READs end, back-offs grow shorter by one. Only the delays are free: who is
refused draws one of ``delays``. With a single value both sides try, refuse and back off together
for ever; `MutualWorld` cannot show that, as there one side may always be faster.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from disagg.checking.explorer.exploration import Exploration, Step, explore
from disagg.checking.explorer.mutual_world import LIVES, OUTPUT, MutualSetting, MutualWorld
from disagg.messages.peer import AskOffers, Commit
from disagg.messages.sampling import SampledToken
from disagg.scheduling.actions import WorkerAction
from disagg.scheduling.step import StepResult
from disagg.transfer.actions import PostRead, Send


class Rounds(NamedTuple):
    """Everything that can differ between two rounds."""

    cores: tuple[int, int]
    told: bool = False
    on_way: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    reads: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    waits: tuple[int, int] = (0, 0)
    """Rounds until who was refused tries again."""


class LockstepWorld:
    """All rounds, for all delays that may be drawn."""

    def __init__(self, setting: MutualSetting, delays: tuple[int, ...] = (1, 2)) -> None:
        self._delays = delays
        self._world = MutualWorld(setting)
        self._workers = self._world.workers

    def explore(self, states_max: int = 100_000) -> Exploration:
        """Visit everything; goals are the rounds in which all is served and nothing is held."""
        start = Rounds((self._workers.start(LIVES[0]), self._workers.start(LIVES[1])))
        return explore(start, self.steps, is_goal=self._is_goal, states_max=states_max)

    def _is_goal(self, now: Rounds) -> bool:
        facts = self._workers.facts
        return now.told and all(facts[core].at_rest for core in now.cores)

    def steps(self, now: Rounds) -> Iterator[Step[Rounds]]:
        """One round, for each pair of delays."""
        for left in self._delays:
            for right in self._delays:
                yield Step(*self._round(now, (left, right)))

    def _round(self, now: Rounds, delays: tuple[int, int]) -> tuple[str, Rounds]:
        said: list[str] = []
        cores, waits = list(now.cores), list(now.waits)
        on_way: tuple[list[int], list[int]] = ([], [])
        reads: tuple[list[int], list[int]] = ([], [])
        for side in (0, 1):
            backed_off = self._workers.facts[now.cores[side]].backing_off
            waits[side] = max(0, waits[side] - 1)
            retries = backed_off and not waits[side]
            events = list(self._events(now, side))
            cores[side], actions, refused = self._workers.round(now.cores[side], retries, events)
            self._sort(side, actions, on_way, reads, silent=retries)
            heard = [type(args[2]).__name__ for _, *args in events if len(args) == 3]
            name, drawn = LIVES[side].worker_id, ""
            if refused and (retries or not backed_off):
                waits[side] = delays[side]
                drawn = f", is refused, waits {delays[side]}"
            said.append(f"{name} hears {' and '.join(heard) or 'nothing'}{drawn}")
        sent = (tuple(on_way[0]), tuple(on_way[1]))
        pair, sent = self._world.renumbered((cores[0], cores[1]), sent)
        read = (tuple(reads[0]), tuple(reads[1]))
        return "; ".join(said), Rounds(pair, True, sent, read, (waits[0], waits[1]))

    def _events(self, now: Rounds, side: int) -> Iterator[tuple[Any, ...]]:
        """What happens to a worker in this round."""
        if not now.told:
            for submit in self._world.submits[side]:
                yield "on_router_message", 0, submit
        for index in now.on_way[side]:
            sender, message = self._world.messages[index]
            yield "on_peer_message", 0, LIVES[sender], message
        step = self._workers.facts[now.cores[side]].step
        if step is not None:
            samples = tuple(SampledToken(OUTPUT) if p.sampling else None for p in step.slices)
            yield "on_step_done", 0, StepResult(step.step_id, samples)
        for read_id in now.reads[side]:
            yield "on_read_done", 0, read_id, ""

    def _sort(
        self,
        side: int,
        actions: tuple[WorkerAction, ...],
        on_way: tuple[list[int], list[int]],
        reads: tuple[list[int], list[int]],
        silent: bool,
    ) -> None:
        for action in actions:
            match action:
                case Send(_, message) if not (silent and isinstance(message, AskOffers | Commit)):
                    on_way[1 - side].append(self._world.number(side, message))
                case PostRead(read_id):
                    reads[side].append(read_id)
