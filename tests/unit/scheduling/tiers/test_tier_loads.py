"""Prefixes that come out of tiers: who waits, what a miss costs, which tier is asked."""

from dataclasses import replace

import pytest

from disagg.kv.hashing import BlockHasher
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import (
    AskLease,
    LeaseLoading,
    LeaseRefused,
    Offers,
    Reserve,
    Reserved,
    WithdrawLease,
)
from disagg.messages.sampling import SamplingParams
from disagg.messages.session import Cancel
from disagg.messages.submit import PeerAddress, Role, Submit
from disagg.scheduling.actions import ReadTier, WorkerAction
from disagg.scheduling.sequence import Phase
from disagg.scheduling.tiers.index import TierIndex
from disagg.scheduling.tiers.loads import FAILED_LOADS_MAX
from disagg.testing.simulation.symbolic_engine import expected_tokens
from disagg.transfer.actions import Send
from tests.unit.scheduling.failure_worlds import LAYOUTS
from tests.unit.scheduling.tiers.test_tier_writes import prompt
from tests.unit.scheduling.tiers.tiered_worker import SLOW_MS, TieredWorker, tier

ASKED = prompt(1, 43)


def forget_pool(worker: TieredWorker) -> None:
    worker.kv.pool.clear_cache()


def written(layout: str = "window_full", *tiers: str, **options: float) -> TieredWorker:
    """A worker whose tiers have `ASKED`, and whose pool has nothing."""
    settings = [tier(name) for name in tiers or ("host",)]
    worker = TieredWorker(LAYOUTS[layout], 120, *settings, **options)  # type: ignore[arg-type]
    worker.ask(ASKED, 2)
    forget_pool(worker)
    return worker


def ask_again(worker: TieredWorker) -> tuple[int, int]:
    """Ask once more; returns the tokens that were found and computed. The answer is right."""
    key = worker.submit(ASKED, 2)
    worker.run()
    assert worker.answer(key) == expected_tokens(worker.core.kv.layout, ASKED, 2)
    report = worker.report(key)
    assert worker.kv.num_free_blocks == worker.kv.num_usable_blocks
    return report.hit_tokens, report.computed_tokens


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_kind_comes_back(layout: str) -> None:
    worker = written(layout)
    assert ask_again(worker) == (40, 3)
    # Of chunks of 20 alone nothing is needed at 40.
    assert worker.counts.get("tier_loads", 0) == (layout != "chunks")
    assert not worker.counts.get("tier_loads_failed")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_block_that_is_missing_shortens_what_comes(layout: str) -> None:
    for key in list(written(layout).stores["host"]):
        worker = written(layout)
        store = worker.stores["host"]
        del store[key]
        found, computed = ask_again(worker)
        assert found + computed == len(ASKED)
        num_missed = worker.counts.get("tier_blocks_missed_host", 0)
        assert num_missed == worker.counts.get("tier_loads_failed", 0) <= 1
        assert (found == 40) == (num_missed == 0)
        if num_missed:
            assert key in store, "computed and written again"
        forget_pool(worker)
        assert ask_again(worker)[0] == 40


def test_who_waits_for_a_tier_is_in_no_step_and_the_others_go_on() -> None:
    worker = TieredWorker(LAYOUTS["window_full"], 120, tier())
    worker.ask(ASKED, 2)
    forget_pool(worker)
    worker._at_once = False
    waits, runs = worker.submit(ASKED, 2), worker.submit(prompt(2, 30), 4)
    step = worker.step()
    assert step is not None
    assert worker.core.sequences[waits].phase is Phase.LOADING
    reads = [copy for copy in worker.copies if isinstance(copy, ReadTier)]
    assert reads
    while step is not None:
        assert [part.key for part in step.slices] == [runs]
        worker.end(step)
        step = worker.step()
    assert runs not in worker.core.sequences
    for read in reads:
        assert worker.core.sequences[waits].phase is Phase.LOADING
        worker.copy(read)
    assert worker.core.sequences[waits].phase is Phase.RUNNING
    worker.run()
    assert worker.answer(waits) == expected_tokens(worker.kv.layout, ASKED, 2)


@pytest.mark.parametrize("ends", ["cancel", "router lost"])
def test_a_read_holds_its_blocks_when_nobody_wants_them_any_more(ends: str) -> None:
    worker = TieredWorker(LAYOUTS["window_full"], 120, tier())
    worker.ask(ASKED, 2)
    forget_pool(worker)
    worker._at_once = False
    key = worker.submit(ASKED, 2)
    worker.run()
    (read,) = worker.copies
    if ends == "cancel":
        worker.perform(worker.core.on_router_message(0, Cancel(key, "test")))
    else:
        worker.perform(worker.core.on_router_lost(0))
    assert not worker.core.tiers.loads
    pool = worker.kv.pool
    assert pool.num_free == pool.num_usable - len(read.blocks)
    others = pool.allocate(pool.num_free)
    assert not {block for _, block in read.blocks} & set(others)
    pool.release(others)
    worker.copy(read)
    assert pool.num_free == pool.num_usable
    assert not any(pool.cache.values()), "nothing was committed"


def test_reads_that_have_not_begun_when_their_sequence_ends_never_begin() -> None:
    worker = written("window_full", blocks_per_copy_max=1)
    worker._at_once = False
    key = worker.submit(ASKED, 2)
    worker.run()
    assert len(worker.copies) == worker.core.limits.tier_copies_max
    worker.perform(worker.core.on_router_message(0, Cancel(key, "test")))
    while worker.copies:
        worker.copy(worker.copies[0])
    assert worker.counts["tier_blocks_read_host"] == worker.core.limits.tier_copies_max
    assert worker.kv.num_free_blocks == worker.kv.num_usable_blocks


def test_the_first_tier_that_has_a_block_is_asked_and_the_next_after_a_miss() -> None:
    worker = written("full", "host", "disk")
    assert ask_again(worker) == (40, 3)
    assert worker.counts["tier_blocks_read_host"] == 10
    assert not worker.counts.get("tier_blocks_read_disk")
    forget_pool(worker)
    for key in list(worker.stores["host"])[:3]:
        del worker.stores["host"][key]
    assert ask_again(worker) == (40, 3), "the rest of it out of the second"
    assert worker.counts["tier_blocks_missed_host"] == 3
    assert worker.counts["tier_blocks_read_disk"] == 3
    assert worker.stores["host"].keys() == worker.stores["disk"].keys(), "and up into the first"


def test_a_generation_gives_up_on_tiers_that_fail_again_and_again() -> None:
    worker = written("full", "host", "disk", "far", "farther")
    for store in worker.stores.values():
        store.clear()
    assert ask_again(worker) == (0, 43)
    assert worker.counts["tier_loads_failed"] == FAILED_LOADS_MAX == 3


def test_a_tier_that_stands_still_is_neither_waited_for_nor_asked() -> None:
    worker = written("window_full", blocks_per_copy_max=2)
    worker._at_once = False
    key = worker.submit(ASKED, 2)
    worker.run()
    others = worker.copies[1:]
    worker.copy(others[0])
    worker.tick(SLOW_MS)
    assert worker.core.tiers.loads
    worker.tick(1)
    worker.run()
    assert worker.answer(key) == expected_tokens(worker.kv.layout, ASKED, 2)
    assert worker.counts["tier_loads_failed"] == 1
    assert worker.report(key).computed_tokens == 43, "of what came, no boundary is whole"
    under_way = worker.copies[:]
    worker.submit(ASKED, 2)
    worker.run()
    assert worker.copies == under_way, "nothing is asked of it, nothing written"
    while worker.copies:
        worker.copy(worker.copies[0])
    forget_pool(worker)
    worker._at_once = True
    assert ask_again(worker) == (40, 3), "it answers again"


def test_what_the_pool_has_is_not_read() -> None:
    worker = written("window_full")
    worker.ask(ASKED[:20])
    before = worker.counts["tier_blocks_read_host"]
    worker.ask(ASKED[:30])
    num_read = worker.counts["tier_blocks_read_host"] - before
    # 20 tokens are in the pool, 28 come: two blocks, and of two windows the two last ones.
    assert num_read == 2 + 2 * 2


def test_a_worker_begins_with_what_its_tiers_know() -> None:
    old = written("states_full")
    known = tuple(old.stores["host"])
    setting = tier()
    new = TieredWorker(old.kv.layout, 120, replace(setting, known=known))
    new.stores = old.stores
    assert ask_again(new) == (40, 3)


def test_the_index_keeps_no_more_than_the_tier_has_room_for() -> None:
    index = TierIndex([tier(blocks_max=3)])
    keys = [(0, bytes([number])) for number in range(5)]
    index.add(0, keys)
    assert [index.find(key) for key in keys] == [None, None, 0, 0, 0]
    index.add(0, [keys[2], (1, b"x")])
    assert index.find(keys[3]) is None
    index.remove(0, [keys[2], keys[0]])
    assert index.num_keys(0) == 2
    index.silent.add(0)
    assert index.find(keys[4]) is None
    assert index.has(0, keys[4])


def submit_decode(worker: TieredWorker) -> RequestKey:
    key, prefill = RequestKey("handed over", 1), Incarnation("p", "e")
    address = PeerAddress(prefill, "host:1")
    submit = Submit(key, Role.DECODE, ASKED, (), b"", SamplingParams(2), address)
    worker.perform(worker.core.on_router_message(0, submit))
    return key


def first_lacked(worker: TieredWorker, key: RequestKey) -> tuple[int, ...]:
    """Per group the first token that the decode worker asks of its prefill worker."""
    prefill = Incarnation("p", "e")
    actions = worker.core.on_peer_message(0, prefill, Reserve(key, 1))
    (answer,) = (one.message for one in actions if isinstance(one, Send))
    assert isinstance(answer, Reserved)
    assert answer.granted, answer
    return answer.first_lacked


@pytest.mark.parametrize(("comes", "first"), [(True, 40), (False, 0)])
def test_a_decode_worker_prefetches_what_is_then_not_pulled(comes: bool, first: int) -> None:
    worker = written("window_full")
    worker._at_once = comes
    key = submit_decode(worker)
    assert worker.counts["tier_prefetches"] == 1
    assert worker.core.sequences[key].phase is Phase.AWAITING_RESERVE, "nobody waits for it"
    (full,) = [m.group for m in worker.kv.managers if m.hits_nest]
    assert first_lacked(worker, key)[full] == first
    worker.perform(worker.core.on_router_message(0, Cancel(key, "test")))
    while worker.copies:
        worker.copy(worker.copies[0])
    assert worker.kv.num_free_blocks == worker.kv.num_usable_blocks
    assert not worker.core.budget.num_blocks


def test_what_of_a_prefetch_has_come_when_it_is_reserved_for_counts() -> None:
    worker = written("full", blocks_per_copy_max=3)
    worker._at_once = False
    key = submit_decode(worker)
    worker.copy(worker.copies[0])
    assert first_lacked(worker, key) == (12,)
    worker.perform(worker.core.on_router_message(0, Cancel(key, "test")))
    while worker.copies:
        worker.copy(worker.copies[0])
    assert worker.kv.num_free_blocks == worker.kv.num_usable_blocks


def test_where_nothing_may_be_handed_over_nothing_is_prefetched() -> None:
    worker = written("window_full", handover_share_max=0.0)
    submit_decode(worker)
    assert not worker.counts.get("tier_prefetches")
    assert worker.kv.num_free_blocks == worker.kv.num_usable_blocks


def test_what_of_a_prefetch_does_not_come_is_pulled() -> None:
    worker = written("full")
    del worker.stores["host"][list(worker.stores["host"])[6]]
    key = submit_decode(worker)
    assert worker.counts["tier_loads_failed"] == 1
    assert first_lacked(worker, key) == (24,)


READER = Incarnation("reader", "e")
Answer = Offers | LeaseRefused | LeaseLoading


def ask_lease(worker: TieredWorker, number: int = 1, first: int = 0) -> list[Answer]:
    """Another worker asks for a lease of `ASKED`; what it is answered at once."""
    hashes: list[bytes] = []
    size = worker.kv.layout.hash_block_tokens
    BlockHasher(b"tiers", size).extend(hashes, ASKED)
    lacked = tuple(first for _ in worker.kv.managers)
    wanted = tuple(hashes[first // size : 40 // size])
    message = AskLease(RequestKey("pulls", 1), number, 40, first // size, wanted, lacked)
    return answers_to(worker, worker.core.on_peer_message(0, READER, message))


def answers_to(worker: TieredWorker, actions: list[WorkerAction]) -> list[Answer]:
    worker.perform(actions)
    answers = [one.message for one in worker.sent if isinstance(one.message, Answer)]
    worker.sent.clear()
    return answers


@pytest.mark.parametrize("layout", ["full", "window_full", "states_full", "chunks_full"])
def test_what_another_worker_pulls_is_loaded_and_then_lent(layout: str) -> None:
    worker = written(layout)
    (offers,) = ask_lease(worker)
    assert isinstance(offers, Offers)
    assert offers.seal is not None
    assert offers.seal.num_tokens == 40
    assert worker.core.leases.num_live == 1
    assert offers.ranges or layout == "chunks_full"
    assert not worker.core.tiers.lending._asked


def test_who_asks_is_told_how_much_has_come() -> None:
    worker = written("full", blocks_per_copy_max=4)
    worker._at_once = False
    ask_lease(worker)
    told = []
    while worker.copies:
        told += ask_lease(worker)
        worker.copy(worker.copies[0])
    assert [one.num_blocks for one in told if isinstance(one, LeaseLoading)] == [0, 4, 8]
    (offers,) = answers_to(worker, [])
    assert isinstance(offers, Offers)


def test_who_asks_for_it_waits_and_asks_again() -> None:
    worker = written("full")
    worker._at_once = False
    assert ask_lease(worker) == []
    (read,) = worker.copies
    said = LeaseLoading(RequestKey("pulls", 1), 1, 0)
    assert ask_lease(worker) == [said], "a repetition of the same request"
    assert worker.copies == [read]
    budget = worker.core.budget.num_blocks
    assert budget == 10
    worker.copy(read)
    (offers,) = answers_to(worker, [])
    assert isinstance(offers, Offers)
    assert ask_lease(worker) == [offers], "the old answer again"
    assert worker.core.budget.num_blocks == budget


@pytest.mark.parametrize("how", ["withdrawn", "lost"])
def test_nobody_is_lent_what_nobody_waits_for(how: str) -> None:
    worker = written("full")
    worker._at_once = False
    ask_lease(worker)
    if how == "withdrawn":
        gone = worker.core.on_peer_message(0, READER, WithdrawLease(RequestKey("pulls", 1), 1))
    else:
        gone = worker.core.on_peer_lost(0, READER)
    assert answers_to(worker, gone) == []
    while worker.copies:
        worker.copy(worker.copies[0])
    assert answers_to(worker, []) == []
    assert worker.core.leases.num_live == 0
    assert not worker.core.budget.num_blocks
    assert worker.kv.num_free_blocks == worker.kv.num_usable_blocks


def test_what_a_tier_has_lost_is_not_lent() -> None:
    worker = written("full")
    del worker.stores["host"][list(worker.stores["host"])[6]]
    (offers,) = ask_lease(worker)
    assert isinstance(offers, Offers)
    assert offers.seal is not None
    assert offers.seal.num_tokens == 24
    empty = written("full")
    empty.stores["host"].clear()
    assert [type(one) for one in ask_lease(empty)] == [LeaseRefused]


def test_only_a_whole_prefix_is_loaded_for_others() -> None:
    """Of a part nobody sent the chain values before it; what the pool has is lent as ever."""
    worker = written("full")
    assert [type(one) for one in ask_lease(worker, first=8)] == [LeaseRefused]
    assert not worker.counts.get("tier_prefetches")
