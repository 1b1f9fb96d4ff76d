"""Numbered messages in order: what is missing is asked for, what cannot be had is given up."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

T = TypeVar("T")

WAITING_MAX = 1024
"""Messages kept while those before them are asked for; later ones are asked for again."""
REPLAY_SILENT_MS = 5_000
"""A replay that brings nothing for so long is over."""
FRUITLESS_MAX = 2
"""Replays in a row without what is missing. The first may have been answered before it was sent."""
PROBE_MS = 10_000
"""So long after the last message it is asked whether there are more."""
REPLAYED_MAX = 20_000
"""Of which hashes are kept: twice what vLLM keeps of messages."""


class Lost(Enum):
    """What was told so far cannot be completed any more: all of it is to be forgotten."""

    LOST = auto()


LOST = Lost.LOST


@dataclass(frozen=True, slots=True)
class AskReplay:
    """The shell is to ask for messages from ``first`` on; of an earlier replay none may follow."""

    first: int


Step = Lost | AskReplay | tuple[T]
"""A message in its turn is a tuple of one."""


class EventOrder(Generic[T]):
    """The messages of one publisher, numbered from 0 in each of its lives.

    Each method returns what is to be done now, in order. A message counts once. Where one is
    missing a replay is asked for, again and again as long as that gets further; what two of them
    did not bring is lost, and with it what was told before. Where a replay brought another message
    under a number than the publisher sends, it was of another one: what it told is lost.

    Args:
        can_replay: the publisher answers requests for a replay.
    """

    def __init__(self, *, can_replay: bool) -> None:
        self._can_replay = can_replay
        self._next: int | None = None
        """Number wanted; None: whatever comes first."""
        self._newest = -1
        """Highest number that came unasked in this life."""
        self._waiting: deque[tuple[int, T]] = deque()
        self._asked_from: int | None = None
        """Where the replay that is under way began."""
        self._num_fruitless = 0
        self._replayed: OrderedDict[int, int] = OrderedDict()
        """Hashes of what the last replays brought, until a message came behind them."""
        self.is_foreign = False
        """Of another publisher are the replays, so none is asked for in this life."""
        self._is_connected = False
        self._heard_ms = 0

    @property
    def is_complete(self) -> bool:
        """Nothing is known to be missing."""
        return self._is_connected and not self.is_asking

    @property
    def is_asking(self) -> bool:
        """A replay is under way: what comes unasked waits for its end."""
        return self._asked_from is not None

    @property
    def _may_ask(self) -> bool:
        return self._can_replay and not self.is_foreign

    def connected(self, now_ms: int) -> list[Step[T]]:
        """The publisher is there: perhaps another life of it, so everything is asked for anew."""
        self._is_connected = True
        return self._start_anew(now_ms)

    def disconnected(self) -> list[Step[T]]:
        """The publisher is gone, and its cache perhaps with it."""
        self._is_connected = False
        self._asked_from = None
        self._waiting.clear()
        return [LOST]

    def live(self, now_ms: int, number: int, message: T) -> list[Step[T]]:
        """A message came unasked; their numbers rise within a life.

        Of one that comes while nobody is connected it is unknown in which life it was published.
        """
        if not self._is_connected:
            return []
        steps: list[Step[T]] = []
        if number <= self._newest:
            steps += self._start_anew(now_ms)
        self._newest = number
        if self._asked_from is not None:
            if len(self._waiting) < WAITING_MAX:
                self._waiting.append((number, message))
            return steps
        self._heard_ms = now_ms
        self._waiting.append((number, message))
        return steps + list(self._take_waiting(now_ms))

    def replayed(self, now_ms: int, number: int, message: T) -> list[Step[T]]:
        """A message of the replay that was asked for last."""
        if self._asked_from is None or self._next is None:
            return []
        self._heard_ms = now_ms
        steps: list[Step[T]] = []
        if number > self._next and self._next == self._asked_from:
            steps.append(LOST)  # its publisher does not keep them any more
            self._next = number
        if number == self._next:  # one after a hole is asked for again
            self._next = number + 1
            self._replayed[number] = _hash_of(message)
            if len(self._replayed) > REPLAYED_MAX:
                self._replayed.popitem(last=False)
            steps.append((message,))
        return steps

    def replay_ended(self, now_ms: int) -> list[Step[T]]:
        """All of it came, or no more will."""
        if self._asked_from is None or self._next is None:
            return []
        is_fruitless = self._next == self._asked_from and self._next <= self._newest
        self._num_fruitless = self._num_fruitless + 1 if is_fruitless else 0
        self._asked_from = None
        self._heard_ms = now_ms
        steps = list(self._take_waiting(now_ms))
        if self._asked_from is None and self._next <= self._newest:  # more came than could wait
            if self._may_ask and self._num_fruitless < FRUITLESS_MAX:
                steps.append(self._ask(now_ms, self._next))
            else:
                steps.append(LOST)
                self._next, self._num_fruitless = self._newest + 1, 0
        return steps

    def tick(self, now_ms: int) -> list[Step[T]]:
        """Time goes on: a silent replay is over, a silent publisher is asked."""
        silent_ms = now_ms - self._heard_ms
        if self._asked_from is not None:
            return self.replay_ended(now_ms) if silent_ms >= REPLAY_SILENT_MS else []
        if self._is_connected and self._may_ask and silent_ms >= PROBE_MS:
            return [self._ask(now_ms, self._next or 0)]
        return []

    def _start_anew(self, now_ms: int) -> list[Step[T]]:
        self._newest = -1
        self._waiting.clear()
        self._replayed.clear()
        self.is_foreign = False
        self._asked_from = None
        self._num_fruitless = 0
        self._heard_ms = now_ms
        self._next = 0 if self._can_replay else None
        return [LOST, self._ask(now_ms, 0)] if self._can_replay else [LOST]

    def _ask(self, now_ms: int, first: int) -> AskReplay:
        self._asked_from = self._next = first
        self._heard_ms = now_ms
        return AskReplay(first)

    def _take_waiting(self, now_ms: int) -> Iterator[Step[T]]:
        """What waits, up to where something is missing that is asked for."""
        while self._waiting:
            number, message = self._waiting[0]
            if self._next is None:
                self._next = number
            if number > self._next:
                if self._may_ask and self._num_fruitless < FRUITLESS_MAX:
                    yield self._ask(now_ms, self._next)
                    return
                yield LOST
                self._next = number
            self._waiting.popleft()
            known = self._replayed.get(number)
            if number < self._next and known is not None and known != _hash_of(message):
                self.is_foreign = True
                yield LOST
                self._next = number
            if number == self._next:
                self._next = number + 1
                self._replayed.clear()  # what comes now has higher numbers
                yield (message,)
            self._num_fruitless = 0


def _hash_of(message: object) -> int:
    """Equal for equal ones; of an error by what it says."""
    return hash(message if isinstance(message, tuple) else str(message))
