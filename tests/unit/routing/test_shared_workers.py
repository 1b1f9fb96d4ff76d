"""Two routers over the same worker: what it is given stays within its bounds in total."""

import random
from dataclasses import replace

import pytest

from disagg.messages.stats import RouterLoad
from tests.unit.routing.builders import STATS
from tests.unit.routing.test_admission import Fleet

BOUND = 8


class Shared:
    """One worker, and the routers that share it; it tells each what all have there.

    Args:
        told: whether it says whose its load is; otherwise it is as if there were one router.
    """

    def __init__(self, *names: str, told: bool = True, **settings: int) -> None:
        bounds = {"max_sequences": 6, "worker_waiting_max": BOUND - 6} | settings
        self.routers = {name: Fleet("both", router_id=name, **bounds) for name in names}
        self._told = told

    def report(self, *names: str) -> None:
        loads = tuple(
            RouterLoad(name, len(router.running), self.num_tokens(name))
            for name, router in self.routers.items()
            if router.running
        )
        stats = replace(STATS, loads=loads if self._told else ())
        for name in names or self.routers:
            router = self.routers[name]
            info = router.infos["w0"]
            router.did(router.core.from_worker(0, info.incarnation, stats))

    def num_tokens(self, name: str) -> int:
        running = self.routers[name].running.values()
        return sum(len(submit.token_ids) for _, submit in running)

    def ask(self, name: str, *requests: int) -> None:
        self.routers[name].ask(*(f"{name}{number}" for number in requests))

    def finish_one(self, name: str) -> None:
        self.routers[name].finish(next(iter(self.routers[name].running)))

    @property
    def at_worker(self) -> dict[str, int]:
        return {name: len(router.running) for name, router in self.routers.items()}


def test_who_is_alone_may_have_all() -> None:
    shared = Shared("a", "b")
    shared.ask("a", *range(20))
    shared.report()
    assert shared.at_worker == {"a": BOUND, "b": 0}


def settle(shared: Shared, names: str) -> None:
    """Whoever has more than it may have gives it up, a request at a time."""
    for name in names * BOUND:
        if sum(shared.at_worker.values()) > BOUND:
            shared.finish_one(name)
            shared.report()


def test_a_second_router_has_its_part_and_the_first_gives_it_up() -> None:
    """Who has filled a worker hears of its own ends first: it would never let another in."""
    shared = Shared("a", "b")
    shared.ask("a", *range(60))
    shared.report()
    shared.ask("b", *range(60))
    assert shared.at_worker == {"a": BOUND, "b": BOUND // 2}
    shared.report()
    settle(shared, "a")
    assert shared.at_worker == {"a": BOUND // 2, "b": BOUND // 2}
    for name in "aabbab" * 3:
        shared.finish_one(name)
        shared.report()
        assert sum(shared.at_worker.values()) == BOUND


def test_what_the_other_does_not_use_is_used() -> None:
    shared = Shared("a", "b")
    shared.ask("b", 0)
    shared.report()
    shared.ask("a", *range(40))
    for _ in range(4):
        shared.report()
    assert shared.at_worker == {"a": BOUND - 2, "b": 1}, "but for what both would take at once"
    shared.finish_one("b")
    shared.report()
    assert shared.at_worker == {"a": BOUND, "b": 0}


def test_prompts_are_bounded_together() -> None:
    shared = Shared("a", "b", max_sequences=0, worker_prefill_tokens_max=80)
    shared.ask("a", *range(6))  # of 10 tokens each
    shared.report()
    shared.ask("b", *range(20))
    assert shared.at_worker == {"a": 6, "b": 4}
    shared.report()
    shared.finish_one("a")
    shared.report()
    shared.ask("a", *range(10, 20))
    assert shared.at_worker == {"a": 5, "b": 4}, "it has had its part"


@pytest.mark.parametrize("told", [True, False])
def test_whatever_they_do_the_bound_holds_once_they_have_heard(told: bool) -> None:
    """The control: where nobody is told of the others, it does not."""
    drawn = random.Random(7)
    shared = Shared("a", "b", "c", told=told)
    for name in "abc":
        shared.ask(name, *range(60))
    shared.report()
    settle(shared, "abc")
    seen = []
    for _ in range(40):
        for _ in range(drawn.randint(1, 4)):
            shared.finish_one(drawn.choice([one for one, num in shared.at_worker.items() if num]))
        shared.report()
        seen.append(sum(shared.at_worker.values()))
    assert (max(seen) <= BOUND) == told, seen
    assert min(seen) >= BOUND - 3, "nor is it left idle"


def test_routers_that_begin_at_one_moment_give_up_what_is_too_much() -> None:
    shared = Shared("a", "b")
    for name in "ab":
        shared.ask(name, *range(60))  # neither has heard of the other
    assert sum(shared.at_worker.values()) == 2 * BOUND
    settle(shared, "ab")
    assert shared.at_worker == {"a": BOUND // 2, "b": BOUND // 2}
