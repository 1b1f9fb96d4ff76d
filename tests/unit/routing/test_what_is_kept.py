"""What a router keeps of what has gone is bounded."""

from disagg.routing import positions
from disagg.routing.chain import OFFSET_BITS, VALUE_BYTES, Chain
from disagg.routing.positions import PositionTable
from tests.unit.routing.measured_fleet import D, P, fleet
from tests.unit.routing.test_index_removals import block_value


def test_a_chain_that_is_cut_gives_the_memory_back() -> None:
    """A bytearray keeps what it had until half of it is gone, in each of thousands of chains."""
    chain = Chain(1)
    chain.append(bytearray(1000 * VALUE_BYTES))
    for num in (700, 600, 1):
        chain.shorten(num)
        assert len(chain) == num
        assert 7 * chain.values.__alloc__() <= 8 * (num + 1) * VALUE_BYTES
    assert chain.num_dead == 1


def test_values_told_a_few_at_a_time_do_not_wait_for_ever() -> None:
    """They are entered together, which costs less each, and take more memory until then."""
    chains = [Chain(1) for _ in range(2)]
    table = PositionTable(chains)
    for number in range(3 * positions._WAITING_MAX):
        table.insert([value := block_value(number)], value, 1 << OFFSET_BITS | number)
        chains[1].append(bytearray(value))
        assert len(table._coming) < positions._WAITING_MAX
    assert table.find(block_value(5)) == 1 << OFFSET_BITS | 5


def test_nothing_is_kept_that_was_measured_of_a_worker_which_has_left() -> None:
    """Each life of a worker is another one, and none comes again."""
    router = fleet(P, D)
    speeds = router.core._fleet.speeds
    assert set(speeds._workers) == {P.incarnation, D.incarnation}
    assert set(speeds._links._links) == {(P.incarnation, D.incarnation)}
    router.lost(D)
    assert set(speeds._workers) == {P.incarnation}
    assert not speeds._links._links
