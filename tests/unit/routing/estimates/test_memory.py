"""What a request waits for memory: by hand, and as plans go by it."""

from dataclasses import replace

from disagg.messages.registration import WorkerInfo
from disagg.messages.submit import Role
from disagg.routing.estimates.estimate import Move, Work, estimate
from disagg.routing.estimates.kv_bytes import num_blocks_of
from disagg.routing.estimates.place import LinkCost, Place, StepCost
from tests.unit.routing.measured_fleet import D2, D, P, fleet, roles, say, served
from tests.unit.routing.test_index import group

MIB = 1 << 20
ROOMY = Place(StepCost(10, 0, 0, 0, 0), 4, 0, 0, 0, 4, 8, 0)
FULL = replace(ROOMY, num_blocks_used=400, num_holding=4, num_blocks_free=30)
QUEUE_MS = 10 / 2


def test_who_finds_no_blocks_waits_until_answers_give_them_back() -> None:
    """All 400 blocks come free in the 64 steps of an answer, by turns."""
    work = Work(100, 0, 64, num_blocks=130)
    assert estimate(work, FULL, FULL).queue_ms == QUEUE_MS + 100 / 400 * 64 * 10
    enough = replace(FULL, num_blocks_free=130)
    for place in (ROOMY, enough):
        assert estimate(work, place, place).queue_ms == QUEUE_MS


def test_who_waits_for_blocks_already_comes_first() -> None:
    """Two of them, each with as many as the four have that hold some."""
    crowd = replace(FULL, num_waiting=2)
    assert crowd.num_blocks_missing(130) == 130 + 2 * 100 - 30
    assert crowd.num_blocks_missing(0) == 170
    assert replace(crowd, num_blocks_free=330).num_blocks_missing(130) == 0


def test_what_lies_where_prompts_are_computed_has_to_be_read_first() -> None:
    move = Move(MIB, 0, LinkCost(2, 5))
    work = Work(100, 0, 64, handover=move, num_blocks=130, num_blocks_handed=0, block_bytes=MIB)
    idle = replace(ROOMY, num_running=0)
    lends = replace(FULL, num_running=0)
    assert estimate(work, lends, idle).queue_ms == 100 * 5
    handed = replace(work, num_blocks_handed=50)
    reader = estimate(handed, idle, FULL).queue_ms
    assert reader == (50 - 30) / 400 * 64 * 10, "and room has to be where it is decoded"


def test_a_prompt_takes_what_it_does_not_find() -> None:
    info = replace(D, groups=(group("full_attention"), group("sliding_window", window_tokens=8)))
    assert num_blocks_of(info, 40, 0) == 10 + 2
    assert num_blocks_of(info, 40, 32) == 2 + 2
    assert num_blocks_of(info, 40, 36) == 1 + 1


def test_a_worker_whose_pool_is_full_is_gone_round() -> None:
    for num_free, who in ((10, "d2"), (190, "d")):
        router = fleet(D, D2)
        say(router, D, num_running=4, num_blocks_usable=200, num_blocks_free=num_free)
        say(router, D2, num_running=5)
        assert roles(served(router)) == {who: Role.LOCAL}, num_free


def full(*workers: WorkerInfo, num_free: int = 0) -> dict[str, Role]:
    """Who has which part of a request, where those that decode have so many blocks free."""
    router = fleet(*workers)
    for one in workers:
        if one.role == "decode":
            say(router, one, num_running=40, num_blocks_usable=200, num_blocks_free=num_free)
    return roles(served(router))


def test_where_all_that_decode_are_full_a_prefill_worker_does_all() -> None:
    assert full(P, D) == {"p": Role.LOCAL}
    assert full(P, D, num_free=190) == {"p": Role.PREFILL, "d": Role.DECODE}, "control"
