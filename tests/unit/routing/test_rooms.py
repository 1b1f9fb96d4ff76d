"""Who has room, kept up to date, equals what is counted anew."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from disagg.messages.identity import RequestKey
from disagg.messages.registration import WorkerInfo
from disagg.messages.session import receipt_of
from disagg.messages.stats import RouterLoad
from disagg.messages.submit import Submit
from disagg.routing.generation import Generation
from disagg.routing.index import PrefixIndex
from disagg.routing.options import WORKER_PREFILL_TOKENS_MAX, WORKER_WAITING_MAX
from disagg.routing.rooms import Rooms
from disagg.routing.worker import Worker
from tests.unit.routing.builders import STATS, Router, request, worker
from tests.unit.routing.model_workers import World

TOKENS_MAX, WAITING_MAX = 20, 1


def has_room(
    router: str,
    info: WorkerInfo,
    generations: list[Generation],
    loads: tuple[RouterLoad, ...],
    tokens_max: int,
    waiting_max: int,
) -> bool:
    """By a count of all that is there."""

    def own_part(most: int, others: dict[str, int]) -> int:
        own = others.get(router, 0)
        num_using = 1 + sum(load > 0 for name, load in others.items() if name != router)
        free = most - sum(others.values())
        return max(1, most // num_using, own + free // num_using)

    name = info.incarnation
    tokens = sum(
        one.num_tokens_to_prefill for one in generations if one.prefill.incarnation == name
    )
    if tokens >= own_part(tokens_max, {load.router: load.num_prefill_tokens for load in loads}):
        return False
    num = sum(one.decode.incarnation == name for one in generations)
    most = info.max_sequences + waiting_max
    requests = {load.router: load.num_requests for load in loads}
    return not info.max_sequences or num < own_part(most, requests)


def check(world: World) -> None:
    core = world.core
    generations = list(core._live.generations())
    fleet, rooms = core._fleet, core._fleet.rooms
    expected = 0
    for view in core.fleet:
        loads = view.stats.loads if view.stats is not None else ()
        bounds = WORKER_PREFILL_TOKENS_MAX, WORKER_WAITING_MAX
        if has_room("", view.info, generations, loads, *bounds):
            expected |= fleet.roster.bits.of([view.info.incarnation])
    assert rooms.roomy == expected
    counted = Counter(one.decode.incarnation for one in generations)
    assert rooms._num_requests == counted


@pytest.mark.parametrize("seed", range(8))
def test_a_router_counts_what_lives(seed: int) -> None:
    world = World(seed)
    for _ in range(300):
        world.step()
        check(world)
    world.settle()
    check(world)


def forgets(_: Rooms, request_id: str) -> tuple[()]:
    """Breaks what `Rooms.forget` must do."""
    return ()


def test_control_an_end_that_is_not_counted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rooms, "forget", forgets)
    with pytest.raises(AssertionError):
        test_a_router_counts_what_lives(0)


@pytest.mark.parametrize("seed", range(20))
def test_bounds_are_shared_with_other_routers(seed: int) -> None:
    chance = random.Random(seed)
    rooms = Rooms("a", TOKENS_MAX, WAITING_MAX)
    workers = [
        Worker(worker(name, max_sequences=chance.choice((0, 2))), PrefixIndex((), 4), 0)
        for name in ("w0", "w1", "w2")
    ]
    live: dict[str, Generation] = {}
    for step in range(200):
        number = chance.randrange(3)
        match chance.randrange(3):
            case 0:
                loads = tuple(
                    RouterLoad(name, chance.randint(0, 3), chance.choice((0, 5, 30)))
                    for name in chance.sample(("a", "b", "c"), chance.randint(0, 3))
                )
                workers[number].stats = replace(STATS, loads=loads)
                rooms.put(1 << number, workers[number])
            case 1:
                one = Generation(
                    RequestKey(str(step), 1),
                    0,
                    workers[number].info,
                    chance.choice(workers).info,
                    "",
                    0,
                    chance.randint(1, 12),
                )
                request_id = chance.choice((*live, str(step)))
                live[request_id] = one
                rooms.count(request_id, one)
            case _ if live:
                request_id = chance.choice(list(live))
                del live[request_id]
                rooms.forget(request_id)
        for number, teller in enumerate(workers):
            if teller.stats is not None:
                told = teller.info, list(live.values()), teller.stats.loads
                expected = has_room("a", *told, TOKENS_MAX, WAITING_MAX)
                assert bool(rooms.roomy & 1 << number) == expected


PREFILL, DECODE = (worker(role, role, max_sequences=1) for role in ("prefill", "decode"))


def receives(router: Router, info: WorkerInfo, submit: Submit) -> None:
    router.did(router.core.from_worker(router.now_ms, info.incarnation, receipt_of(submit)))


def left_at_once() -> tuple[Router, Submit]:
    """A router whose workers have said once what they received, and what its next client wanted."""
    router = Router(PREFILL, DECODE, policy="cache_affinity", worker_waiting_max=0)
    for name in ("before", "left"):
        router.generate(request(name))
        ((_, submit), _) = router.submits
        if name == "before":
            receives(router, PREFILL, submit)
            receives(router, DECODE, submit)
        router.did(router.core.cancel(router.now_ms, name, "client left"))
    router.generate(request("next"))
    return router, submit


def test_a_client_that_leaves_makes_room_when_the_workers_have_heard_of_it() -> None:
    """Else one that leaves again and again fills the streams to them, ahead of all others."""
    router, submit = left_at_once()
    assert router.core.num_waiting == 1
    receives(router, DECODE, submit)
    assert router.core.num_waiting == 1
    receives(router, PREFILL, submit)
    assert router.core.num_waiting == 0
    assert {one.key.request_id for _, one in router.submits} == {"next"}


def test_or_when_those_that_have_not_are_gone() -> None:
    router, submit = left_at_once()
    receives(router, DECODE, submit)
    router.lost(PREFILL)
    router.did(router.core.tick(router.now_ms))
    assert router.core.num_waiting == 0
