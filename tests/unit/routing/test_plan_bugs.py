"""A request whose planning fails by a bug ends alone; nobody else hears of it."""

import pytest

from disagg.errors import PlanError, RemoteFault
from disagg.messages.outputs import FinishReason
from disagg.routing.actions import Fail
from disagg.routing.policy.candidates import Candidates
from disagg.routing.policy.prefix_then_load import PrefixThenLoad
from disagg.routing.policy.protocol import Demand, Plan
from disagg.routing.policy.registry import DEFAULT_POLICY, POLICIES
from tests.unit.routing.builders import request, worker
from tests.unit.routing.test_admission import Fleet
from tests.unit.routing.test_take_over import sealed, trio

UNLUCKY_TOKENS = 13


class Buggy(PrefixThenLoad):
    def plan(self, demand: Demand, candidates: Candidates) -> Plan:
        if demand.num_tokens == UNLUCKY_TOKENS:
            raise KeyError("a bug of ours")
        return super().plan(demand, candidates)


class Bugs(list[tuple[str, str]]):
    def __call__(self, request_id: str, error: Exception) -> None:
        self.append((request_id, type(error).__name__))


@pytest.fixture(autouse=True)
def buggy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, DEFAULT_POLICY, Buggy)


def waiting_fleet(bugs: Bugs | None) -> Fleet:
    """One request runs, another waits that cannot be planned, and behind it a third."""
    fleet = Fleet("both", on_plan_bug=bugs)
    fleet.ask("runs", tenant="a")
    fleet.generate(request("unlucky", UNLUCKY_TOKENS, 2, tenant="b"))
    fleet.ask("waits", tenant="b")
    return fleet


def test_who_waits_and_cannot_be_planned_ends_alone() -> None:
    bugs = Bugs()
    fleet = waiting_fleet(bugs)
    who, submit = fleet.running.pop("runs")
    fleet.tokens(fleet.infos[who], submit, 10, 1, 2, finish=FinishReason.LENGTH)
    assert fleet.delivered == [1, 2]  # of the same message
    assert isinstance(fleet.error, PlanError)
    assert isinstance(fleet.error.__cause__, KeyError)
    assert fleet.error.request_id == "unlucky"
    assert bugs == [("unlucky", "KeyError")]
    assert [key.request_id for _, key in ((n, s.key) for n, s in fleet.submits)] == ["waits"]
    fleet.finish("waits")
    assert not fleet.core.num_live


def test_control_where_nobody_is_told_it_is_raised() -> None:
    fleet = waiting_fleet(None)
    who, submit = fleet.running.pop("runs")
    with pytest.raises(KeyError):
        fleet.tokens(fleet.infos[who], submit, 10, 1, 2, finish=FinishReason.LENGTH)


def test_who_runs_and_cannot_be_planned_anew_ends_alone() -> None:
    bugs = Bugs()
    fleet = Fleet("both", "both", max_sequences=2, replans_max=3, on_plan_bug=bugs)
    fleet.generate(request("grows", UNLUCKY_TOKENS - 2, 8))
    fleet.generate(request("other", 10, 8))
    grows, submit = fleet.running["grows"]
    fleet.tokens(fleet.infos[grows], submit, UNLUCKY_TOKENS - 2, 1, 2)
    other, _ = fleet.running["other"]
    assert other != grows
    fleet.did(fleet.core.session_lost(fleet.now_ms, fleet.infos[grows].incarnation))
    (failed,) = (one for one in fleet.actions if isinstance(one, Fail))
    assert failed.request_id == "grows"
    assert isinstance(failed.error, RemoteFault)
    assert bugs == [("grows", "KeyError")]
    assert fleet.core.num_live == 1
    fleet.join(worker("w2"))
    fleet.ask("new")
    assert fleet.submits


def test_a_lease_that_cannot_be_handed_on_by_a_bug_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bugs, router = Bugs(), trio()
    router.core._lifecycle._planner._on_bug = bugs
    _, to_prefill = sealed(router)

    def raise_once(*arguments: object) -> None:
        monkeypatch.undo()
        raise KeyError("a bug of ours")

    monkeypatch.setattr(Candidates, "first_to_decode", raise_once)
    router.lost(worker("d1"))
    assert bugs == [("r", "KeyError")]
    assert [(name, one.take_over) for name, one in router.submits] == [("d2", None), ("p", None)]
    assert router.cancels == [("p", to_prefill.key.generation)]
