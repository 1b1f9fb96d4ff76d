"""Workers that retry without end: what only counts the tries is forgotten."""

from dataclasses import replace
from typing import Any, NamedTuple

from disagg.checking.explorer.pair_worker import Workers
from disagg.messages.identity import RequestKey
from disagg.scheduling.actions import WorkerAction
from disagg.scheduling.core import WorkerCore
from disagg.transfer.reservation.states import ReservationState


class Answered(NamedTuple):
    """A reservation that was asked for."""

    key: RequestKey
    granted: bool
    number: int
    released: int


class Numbers(NamedTuple):
    """What the numbers of a worker's questions depend on."""

    asked: frozenset[int]
    """Of its open and granted questions."""
    answered: tuple[Answered, ...]
    """Questions of others that it has answered and not forgotten."""
    preempted_waiting: bool
    """Somebody who lost its memory waits for it."""


class MutualWorkers(Workers):
    """All states of workers; the numbers of their questions can be made small again."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.numbers: list[Numbers] = []
        self._renumbered: dict[tuple[Any, ...], int] = {}
        self._rounds: dict[tuple[Any, ...], tuple[int, tuple[WorkerAction, ...], bool]] = {}
        super().__init__(*args, **options)

    def round(
        self, number: int, retries: bool, events: list[tuple[Any, ...]]
    ) -> tuple[int, tuple[WorkerAction, ...], bool]:
        """All that happens at one moment: the worker after it, its wishes, is anybody refused.

        Args:
            number: the worker.
            retries: the back-off of who was refused is over.
            events: calls of the core.
        """
        call = (number, retries, *events)
        done = self._rounds.get(call)
        if done is None:
            core = self.thaw(number)
            actions: list[WorkerAction] = list(core.tick(0)) if retries else []
            for method, *args in events:
                actions += getattr(core, method)(*args)
            actions += core.next_step(0)[1]
            core.kv.check()
            after = self._freeze(core), tuple(actions), bool(core.prefill_side.backing_off)
            done = self._rounds[call] = after
        return done

    def renumber_asked(self, number: int, order: tuple[int, ...]) -> int:
        """The same worker, its questions numbered by their places in ``order``, from 1."""
        call = (number, order)
        renumbered = self._renumbered.get(call)
        if renumbered is None:
            core = self.thaw(number)
            for question in core.prefill_side._requests._entries.values():
                question.number = order.index(question.number) + 1
            core.prefill_side._requests._last_number = len(order)
            renumbered = self._renumbered[call] = self._freeze(core)
        return renumbered

    def renumber_answered(
        self, number: int, order: tuple[int, ...], forgotten: frozenset[RequestKey]
    ) -> int:
        """The same worker, what it answered numbered likewise, or as if never asked for."""
        call = (number, order, forgotten)
        renumbered = self._renumbered.get(call)
        if renumbered is None:
            places = {old: place for place, old in enumerate((0, *order))}
            core = self.thaw(number)
            for key, entry in core.decode_side._reservations._entries.items():
                if key in forgotten:
                    entry.state, entry.answer = ReservationState.SUBMITTED, None
                    entry.number = entry.released = 0
                else:
                    entry.number, entry.released = places[entry.number], places[entry.released]
                    if entry.answer is not None:
                        entry.answer = replace(entry.answer, number=entry.number)
            renumbered = self._renumbered[call] = self._freeze(core)
        return renumbered

    def _freeze(self, core: WorkerCore) -> int:
        for seq in core.sequences.values():
            seq.passes = 0
        number = super()._freeze(core)
        if number == len(self.numbers):
            answered = tuple(
                Answered(key, entry.state is ReservationState.GRANTED, entry.number, entry.released)
                for key, entry in core.decode_side._reservations._entries.items()
                if entry.number or entry.released
            )
            asked = frozenset(one.number for one in core.prefill_side._requests._entries.values())
            self.numbers.append(Numbers(asked, answered, core.batcher.preempted_waiting))
        return number
