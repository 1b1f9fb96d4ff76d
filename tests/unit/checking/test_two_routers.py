"""A router that is lost takes its own requests with it: what is seen where that rule is broken."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from disagg.checking.explorer.setting import Setting
from disagg.checking.explorer.small_worlds import SMALL_WORLDS
from disagg.checking.explorer.world import World
from disagg.messages.identity import RequestKey
from disagg.scheduling.actions import WorkerAction
from disagg.scheduling.core import WorkerCore

ROUTERS = SMALL_WORLDS["routers"][-1]


class EndsEverything(WorkerCore):
    """The worker of one router only: whoever is lost, all ends."""

    def on_router_lost(self, now_ms: int, router: str = "") -> list[WorkerAction]:
        actions: list[WorkerAction] = []
        for one in {key.router for key in self.sequences} | {router}:
            actions += super().on_router_lost(now_ms, one)
        return actions


class EndsSequencesOnly(WorkerCore):
    """Leases that are left from a prefill stay until they expire."""

    def _parts_of(self, concerned: Callable[[RequestKey], bool]) -> list[RequestKey]:
        return [key for key in self.sequences if concerned(key)]


def becomes(kind: type[WorkerCore]) -> Setting:
    def mutate(core: WorkerCore) -> None:
        core.__class__ = kind

    return replace(ROUTERS, mutate=mutate)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (EndsEverything, "when router A is lost"),
        (EndsSequencesOnly, "when router A is lost"),
    ],
)
def test_the_promise_is_seen_to_be_broken(kind: type[WorkerCore], said: str) -> None:
    seen = World(becomes(kind)).explore()
    assert said in seen.problem, str(seen)
