"""Numbered messages arrive once each and in order, or what was told before is given up."""

import random
from collections import deque

import pytest

from disagg.routing.followed.event_order import (
    LOST,
    PROBE_MS,
    REPLAY_SILENT_MS,
    WAITING_MAX,
    AskReplay,
    EventOrder,
    Step,
)


class Publisher:
    """Lives again and again; keeps a few messages, each of which says who sent it."""

    def __init__(self, kept_max: int) -> None:
        self.kept: deque[tuple[int, tuple[int, int]]] = deque(maxlen=kept_max)
        self.life = self.next = 0

    def publish(self) -> tuple[int, tuple[int, int]]:
        message = (self.next, (self.life, self.next))
        self.next += 1
        self.kept.append(message)
        return message

    def end(self) -> None:
        self.kept.clear()
        self.life, self.next = self.life + 1, 0


class Reader:
    """What was taken in since the last loss, and the replay that is under way."""

    def __init__(self, publisher: Publisher, *, can_replay: bool) -> None:
        self.order: EventOrder[tuple[int, int]] = EventOrder(can_replay=can_replay)
        self.publisher = publisher
        self.taken: list[tuple[int, int]] = []
        self.num_lost = 0
        self.coming: deque[tuple[int, tuple[int, int]] | None] | None = None
        self.is_first = True
        self.now_ms = 0

    def do(self, steps: list[Step[tuple[int, int]]]) -> None:
        for step in steps:
            if step is LOST:
                self.num_lost += 1
                self.taken.clear()
            elif isinstance(step, AskReplay):
                found = [one for one in self.publisher.kept if one[0] >= step.first]
                self.coming, self.is_first = deque([*found, None]), True
            elif isinstance(step, tuple):
                self.taken.append(step[0])
        numbers = [number for _, number in self.taken]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        assert len({life for life, _ in self.taken}) <= 1

    def read_replay(self, chance: random.Random | None = None, loss: float = 0.0) -> None:
        if not self.coming:
            return
        one = self.coming.popleft()
        is_first, self.is_first = self.is_first, False
        if chance is not None and not is_first and chance.random() < loss:
            return  # a queue was full; it is empty when a replay begins
        if one is None:
            self.coming = None
            self.do(self.order.replay_ended(self.now_ms))
        else:
            self.do(self.order.replayed(self.now_ms, *one))


def settle(reader: Reader) -> None:
    """Nothing is lost any more, and time goes on."""
    for _ in range(10):
        while reader.coming:
            reader.read_replay()
        reader.now_ms += max(PROBE_MS, REPLAY_SILENT_MS)
        reader.do(reader.order.tick(reader.now_ms))
    while reader.coming:
        reader.read_replay()


@pytest.mark.parametrize("kept_max", [5, 1000])
@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_lost_nothing_is_out_of_order(seed: int, kept_max: int) -> None:
    chance = random.Random(seed)
    publisher = Publisher(kept_max)
    reader = Reader(publisher, can_replay=True)
    reader.do(reader.order.connected(0))
    for _ in range(300):
        reader.now_ms += chance.randrange(400)
        what = chance.random()
        if what < 0.5:
            message = publisher.publish()
            if chance.random() < 0.8:
                reader.do(reader.order.live(reader.now_ms, *message))
        elif what < 0.9:
            reader.read_replay(chance, 0.1)
        elif what < 0.97:
            reader.do(reader.order.tick(reader.now_ms))
        elif what < 0.99:
            reader.do(reader.order.disconnected())
            assert not reader.taken
            reader.coming = None
            publisher.end()
            reader.do(reader.order.connected(reader.now_ms))
    settle(reader)
    assert reader.order.is_complete
    ended = [(publisher.life, number) for number in range(publisher.next)]
    assert reader.taken == (ended if kept_max == 1000 else ended[-len(reader.taken) :])
    assert len(reader.taken) >= len(publisher.kept)


def test_lower_numbers_are_another_life() -> None:
    """Behind something that keeps connections up the server's end is not seen."""
    reader = Reader(Publisher(100), can_replay=True)
    reader.do(reader.order.connected(0))
    settle(reader)
    for _ in range(5):
        reader.do(reader.order.live(0, *reader.publisher.publish()))
    reader.publisher.end()
    for _ in range(3):
        reader.do(reader.order.live(0, *reader.publisher.publish()))
    settle(reader)
    assert reader.taken == [(1, 0), (1, 1), (1, 2)]


def test_without_a_replay_a_gap_loses_everything() -> None:
    """The control of the test above: there its losses were mended."""
    reader = Reader(Publisher(100), can_replay=False)
    reader.do(reader.order.connected(0))
    messages = [reader.publisher.publish() for _ in range(6)]
    for number in (2, 3, 5):  # it came late, then 4 is lost
        reader.do(reader.order.live(0, *messages[number]))
    assert reader.taken == [(0, 5)]
    assert reader.num_lost == 2  # at the connection, and at the gap
    reader.now_ms += PROBE_MS
    reader.do(reader.order.tick(reader.now_ms))
    assert reader.coming is None


@pytest.mark.parametrize("taken", [(0, 1, 4), (2,), (0, 5)])
def test_a_gap_is_filled_and_nothing_is_forgotten(taken: tuple[int, ...]) -> None:
    """Also one that is the first to come after it was asked many times in vain for more."""
    reader = Reader(Publisher(100), can_replay=True)
    reader.do(reader.order.connected(0))
    settle(reader)
    lost_before = reader.num_lost
    messages = [reader.publisher.publish() for _ in range(6)]
    for number in taken:
        reader.do(reader.order.live(reader.now_ms, *messages[number]))
    assert not reader.order.is_complete
    settle(reader)
    assert [number for _, number in reader.taken] == [0, 1, 2, 3, 4, 5]
    assert reader.num_lost == lost_before


def test_the_last_message_lost_is_found_by_asking() -> None:
    reader = Reader(Publisher(100), can_replay=True)
    reader.do(reader.order.connected(0))
    settle(reader)
    reader.publisher.publish()
    assert reader.taken == []
    reader.now_ms += PROBE_MS - 1
    reader.do(reader.order.tick(reader.now_ms))
    settle(reader)
    assert reader.taken == [(0, 0)]


def test_what_waits_for_a_replay_has_a_bound() -> None:
    reader = Reader(Publisher(10_000), can_replay=True)
    for _ in range(3):
        reader.publisher.publish()
    reader.do(reader.order.connected(0))
    for _ in range(2 * WAITING_MAX):
        reader.do(reader.order.live(0, *reader.publisher.publish()))
    assert len(reader.order._waiting) == WAITING_MAX
    settle(reader)
    assert len(reader.taken) == reader.publisher.next


def test_what_could_not_wait_and_no_replay_has_is_lost() -> None:
    """The replay socket of another server: it ends at once, and nothing more is published."""
    reader = Reader(Publisher(0), can_replay=True)
    reader.do(reader.order.connected(0))
    for _ in range(2 * WAITING_MAX):
        reader.do(reader.order.live(0, *reader.publisher.publish()))
    num_asked = 0
    while reader.coming:
        num_asked += 1
        assert num_asked < 10
        reader.read_replay()
    assert reader.order.is_complete
    assert reader.taken == []
    reader.do(reader.order.live(0, *reader.publisher.publish()))
    assert [number for _, number in reader.taken] == [2 * WAITING_MAX]


def test_a_replay_that_nobody_answers_is_over() -> None:
    reader = Reader(Publisher(100), can_replay=True)
    reader.publisher.publish()
    reader.do(reader.order.connected(0))
    reader.do(reader.order.live(0, *reader.publisher.publish()))
    reader.coming = None
    reader.do(reader.order.tick(REPLAY_SILENT_MS - 1))
    assert reader.taken == []
    for replays in (1, 2):
        reader.do(reader.order.tick(replays * REPLAY_SILENT_MS))
        reader.coming = None
    assert reader.taken == [(0, 1)]


def test_a_replay_answered_too_early_is_asked_for_again() -> None:
    """Nothing was published when it was answered; then the first message was lost."""
    reader = Reader(Publisher(100), can_replay=True)
    reader.do(reader.order.connected(0))
    reader.publisher.publish()
    reader.do(reader.order.live(0, *reader.publisher.publish()))
    settle(reader)
    assert reader.taken == [(0, 0), (0, 1)]


def test_nothing_counts_before_the_connection() -> None:
    reader = Reader(Publisher(100), can_replay=False)
    reader.do(reader.order.live(0, *reader.publisher.publish()))
    reader.do(reader.order.replayed(0, 0, (0, 0)))
    assert reader.taken == []
    assert not reader.order.is_complete


@pytest.mark.parametrize("num_live", [3, 40])
def test_a_replay_of_another_publisher_is_found_out_by_what_it_says(num_live: int) -> None:
    """Its messages were taken for the publisher's, and those of the publisher for seen already."""
    other = Publisher(100)
    other.life = 7
    for _ in range(30):
        other.publish()
    mine = Publisher(0)
    reader = Reader(other, can_replay=True)
    reader.do(reader.order.connected(0))
    while reader.coming:
        reader.read_replay()
    assert {life for life, _ in reader.taken} == {7}, "nothing contradicts it yet"
    for number in range(num_live):
        reader.do(reader.order.live(0, *mine.publish()))
        assert [one for one in reader.taken if one[0] == 7] == []
        assert len(reader.taken) == number + 1
    assert reader.order.is_foreign
    assert reader.order.tick(2 * PROBE_MS) == [], "it is not asked any more"
    reader.do(reader.order.connected(3 * PROBE_MS))
    assert not reader.order.is_foreign, "another connection may be right"


def test_the_publishers_own_replay_and_its_late_messages_are_no_contradiction() -> None:
    publisher = Publisher(100)
    reader = Reader(publisher, can_replay=True)
    late = [publisher.publish() for _ in range(5)]
    reader.do(reader.order.connected(0))
    while reader.coming:
        reader.read_replay()
    for one in (*late, publisher.publish()):
        reader.do(reader.order.live(0, *one))
    assert not reader.order.is_foreign
    assert [number for _, number in reader.taken] == list(range(6))
