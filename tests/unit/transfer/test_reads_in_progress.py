"""Which READs are stuck: those that stand still, not those that wait behind others that go on."""

from disagg.messages.identity import Incarnation, RequestKey
from disagg.transfer.actions import Command
from disagg.transfer.reader.offers import Run
from disagg.transfer.reader.reads import ReadsInProgress
from tests.unit.transfer.two_workers import KEY, OTHER_KEY, OWNER, STUCK

OTHER_OWNER = Incarnation("other", "1")


class Nowhere:
    """Takes commands; the tests end READs themselves."""

    def add(self, command: Command, /) -> None:
        pass


def stuck(reads: ReadsInProgress, now_ms: int) -> list[int]:
    """Serials of the transfers of the READs found stuck now."""
    return [read.inbound for read in reads.take_stuck(now_ms - STUCK)]


def post(
    reads: ReadsInProgress,
    num_reads: int,
    now_ms: int = 0,
    inbound: int = 1,
    owner: Incarnation = OWNER,
    key: RequestKey = KEY,
) -> list[int]:
    """READs of one block each."""
    run = Run(0, 0, 100, tuple(range(num_reads)))
    return reads.post(now_ms, inbound, key, owner, [run])


def test_reads_that_wait_behind_others_that_end_are_not_stuck() -> None:
    """A large prompt over a slow link: each READ ends in time after the one before it."""
    reads = ReadsInProgress(Nowhere(), 1)
    ids = post(reads, 20)
    now_ms = 0
    for read_id in ids:
        now_ms += STUCK - 1
        assert stuck(reads, now_ms) == []
        assert reads.oldest_ms == now_ms - (STUCK - 1)
        assert reads.end(now_ms, read_id) is not None
    assert reads.oldest_ms is None


def test_the_first_of_those_that_stand_still_takes_all_behind_it_along() -> None:
    reads = ReadsInProgress(Nowhere(), 1)
    first, *_ = post(reads, 3)
    post(reads, 2, inbound=2, key=OTHER_KEY)
    post(reads, 1, inbound=3, owner=OTHER_OWNER)
    reads.end(5, first)
    assert stuck(reads, STUCK) == [3], "nothing ends of the other owner's"
    assert stuck(reads, STUCK + 4) == []
    assert stuck(reads, STUCK + 5) == [1, 1, 2, 2]
    assert reads.owners_stuck == {OWNER, OTHER_OWNER}


def test_a_read_that_others_overtake_is_stuck_in_its_time() -> None:
    """However busy its owner is: what moves behind it renews nothing of it."""
    reads = ReadsInProgress(Nowhere(), 1)
    first, *others = post(reads, 5)
    for now_ms, read_id in enumerate(others[:3], start=STUCK - 3):
        reads.end(now_ms, read_id)
    assert stuck(reads, STUCK) == [1]
    assert list(reads._stuck) == [first]
    assert stuck(reads, 2 * STUCK - 2) == []
    assert stuck(reads, 2 * STUCK - 1) == [1]
    free = [ended[1] for one in (first, others[3]) if (ended := reads.end(2 * STUCK, one))]
    assert free == [False, True], "the owner may be read from when none is left"
