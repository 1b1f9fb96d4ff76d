"""A name's keeper is the same for whoever asks, and moves only with its worker."""

from collections import Counter

from disagg.messages.identity import Incarnation
from disagg.routing.keepers import Keepers

NAMES = [b"name %d" % number for number in range(2_000)]


def keepers(*numbers: int) -> Keepers:
    ring = Keepers()
    for number in numbers:
        ring.add(Incarnation(f"worker-{number}", "1"))
    return ring


def test_all_who_know_the_same_workers_ask_the_same_one() -> None:
    one, other = keepers(*range(50)), keepers(*reversed(range(50)))
    assert [one.of(name) for name in NAMES] == [other.of(name) for name in NAMES]


def test_who_leaves_and_comes_back_moves_its_own_names_only() -> None:
    ring, gone = keepers(*range(50)), Incarnation("worker-7", "1")
    before = {name: ring.of(name) for name in NAMES}
    ring.remove(gone)
    moved = {name for name in NAMES if ring.of(name) != before[name]}
    assert moved == {name for name in NAMES if before[name] == gone}
    assert moved, "control"
    ring.add(Incarnation("worker-7", "2"))
    after = {name for name in NAMES if ring.of(name) == Incarnation("worker-7", "2")}
    assert after == moved, "its next life keeps what it kept"


def test_all_keep_about_as_much() -> None:
    ring = keepers(*range(20))
    kept = Counter(ring.of(name) for name in NAMES)
    assert len(kept) == 20
    assert max(kept.values()) < 3 * len(NAMES) / 20


def test_without_workers_nobody_keeps() -> None:
    ring = keepers(1)
    assert ring.of(NAMES[0]) is not None
    ring.remove(Incarnation("worker-1", "1"))
    ring.remove(Incarnation("worker-2", "1"))
    assert ring.of(NAMES[0]) is None
