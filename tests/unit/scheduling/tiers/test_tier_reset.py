"""A reset of the prefix cache reaches the tiers: they bring nothing back that was forgotten."""

import pytest

from disagg.messages.session import PrefixCacheReset, ResetPrefixCache
from disagg.scheduling.actions import ReadTier, WriteTier
from disagg.scheduling.sequence import Phase
from disagg.scheduling.tiers.clearing import TierClearing
from disagg.testing.simulation.symbolic_engine import expected_tokens
from tests.unit.scheduling.failure_worlds import LAYOUTS
from tests.unit.scheduling.tiers.test_tier_loads import ASKED, ask_again, written
from tests.unit.scheduling.tiers.tiered_worker import TieredWorker, tier


def reset(worker: TieredWorker, number: int = 1) -> None:
    worker.perform(worker.core.on_router_message(worker.now_ms, ResetPrefixCache(number)))


def answers(worker: TieredWorker) -> list[PrefixCacheReset]:
    return [one for one in worker.said if isinstance(one, PrefixCacheReset)]


@pytest.mark.parametrize("layout", ["full", "window_full", "states_full"])
def test_nothing_comes_out_of_a_tier_after_a_reset_until_it_is_written_again(layout: str) -> None:
    worker = written(layout, "host", "disk")
    reset(worker)
    assert answers(worker) == [PrefixCacheReset(1, 0)]
    assert not any(worker.stores.values())
    assert ask_again(worker) == (0, 43)
    worker.kv.pool.clear_cache()
    assert ask_again(worker) == (40, 3)


def test_without_clearing_it_would_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(TierClearing, "begin", lambda self: None)
    worker = written("full")
    reset(worker)
    assert ask_again(worker) == (40, 3)


def test_what_is_being_written_is_dropped_before_the_answer() -> None:
    worker = TieredWorker(LAYOUTS["full"], 120, tier(), at_once=False)
    worker.ask(ASKED, 2)
    (first, *_) = worker.copies
    assert isinstance(first, WriteTier)
    reset(worker)
    while worker.copies:
        assert (answers(worker), worker.clears) == ([], []), "not while a copy is under way"
        worker.copy(worker.copies[0])
    assert worker.stores["host"], "what was under way has come there"
    assert ask_again(worker) == (0, 43)
    assert not worker.copies, "nothing is written before it is empty"
    worker.clear("host")
    (answer,) = answers(worker)
    assert (answer.num_forgotten, answer.refused) == (11, "")
    assert worker.copies, "and what was computed since then is"
    while worker.copies:
        worker.copy(worker.copies[0])
    worker.kv.pool.clear_cache()
    worker._at_once = True
    assert ask_again(worker) == (40, 3)


def test_who_loads_when_a_reset_comes_computes() -> None:
    worker = written("window_full")
    worker._at_once = False
    key = worker.submit(ASKED, 2)
    worker.run()
    (read,) = worker.copies
    assert isinstance(read, ReadTier)
    assert worker.core.sequences[key].phase is Phase.LOADING
    reset(worker)
    assert worker.core.sequences[key].phase is Phase.WAITING
    assert not worker.clears, "it still copies"
    worker.run()
    assert worker.answer(key) == expected_tokens(worker.kv.layout, ASKED, 2)
    assert worker.report(key).computed_tokens == 43
    worker.copy(read)
    assert worker.clears == ["host"]
    worker.clear("host")
    assert len(answers(worker)) == 1


def test_a_tier_that_cannot_be_emptied_is_named_and_asked_no_more() -> None:
    worker = written("full", "host", "disk")
    worker._at_once = False
    reset(worker)
    worker.clear("host")
    assert not answers(worker)
    worker.clear("disk", "OSError: read-only")
    assert [one.refused for one in answers(worker)] == ["tier disk: OSError: read-only"]
    worker._at_once = True
    assert ask_again(worker) == (0, 43)
    worker.kv.pool.clear_cache()
    assert ask_again(worker) == (40, 3), "out of the other one"
    assert not worker.counts.get("tier_blocks_read_disk")
    reset(worker, 2)
    assert answers(worker)[-1].refused == ""
    ask_again(worker)
    assert worker.stores["disk"], "it is used again"


def test_a_second_reset_empties_once_more_and_is_answered_alone() -> None:
    worker = written("full")
    worker._at_once = False
    reset(worker, 1)
    reset(worker, 2)
    worker.clear("host")
    assert not answers(worker), "what was written between the two was perhaps not dropped"
    worker.clear("host")
    assert [one.number for one in answers(worker)] == [2]


def test_nobody_is_answered_when_the_router_is_gone() -> None:
    worker = written("full")
    worker._at_once = False
    reset(worker)
    worker.perform(worker.core.on_router_lost(0))
    worker.clear("host")
    assert not answers(worker)
    worker._at_once = True
    assert ask_again(worker) == (0, 43)
