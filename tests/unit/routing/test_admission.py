"""Requests wait at the router: when, in which order, and what ends their waiting."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.errors import CapacityError, ContextLengthError, ExpiredError, RemoteFault
from disagg.messages.outputs import FinishReason
from disagg.messages.session import EndReason
from disagg.messages.submit import Submit
from disagg.routing.actions import Fail, RouterAction
from disagg.routing.policy.registry import POLICIES
from tests.unit.routing.builders import Router, request, worker

NARROW = {"requests_max": 1000, "worker_waiting_max": 0, "replans_max": 0}


class Fleet(Router):
    """A router that waits as soon as a worker runs what it can; keeps what was submitted.

    Attributes:
        running: the submit of every request that is at a worker, by id.
        order: ids, as they were submitted to where they decode.
    """

    def __init__(self, *roles: str, max_sequences: int = 1, **settings: object) -> None:
        self.running: dict[str, tuple[str, Submit]] = {}
        self.order: list[str] = []
        infos = [worker(f"w{n}", role, max_sequences=max_sequences) for n, role in enumerate(roles)]
        self.infos = {info.incarnation.worker_id: info for info in infos}
        super().__init__(*infos, **(NARROW | settings))  # type: ignore[arg-type]

    def did(self, actions: list[RouterAction]) -> list[RouterAction]:
        Router.did(self, actions)
        for name, submit in self.submits:
            if submit.key.request_id not in self.running:
                self.order.append(submit.key.request_id)
                self.running[submit.key.request_id] = name, submit
        for action in actions:
            if isinstance(action, Fail):
                self.running.pop(action.request_id, None)
        return actions

    def ask(self, *names: str, num_tokens: int = 10, tenant: str = "", max_tokens: int = 2) -> None:
        for name in names:
            self.generate(request(name, num_tokens, max_tokens, tenant=tenant))

    def first(self, name: str) -> None:
        who, submit = self.running[name]
        self.tokens(self.infos[who], submit, len(submit.token_ids), 1)

    def finish(self, name: str) -> None:  # type: ignore[override]
        who, submit = self.running.pop(name)
        end = len(submit.token_ids)
        self.tokens(self.infos[who], submit, end, 1, 2, finish=FinishReason.LENGTH)


def test_what_a_worker_has_no_room_for_waits_here_and_goes_by_arrival() -> None:
    fleet = Fleet("both")
    fleet.ask("a", "b", "c")
    assert fleet.order == ["a"]
    assert (fleet.core.num_live, fleet.core.num_waiting) == (3, 2)
    assert fleet.record("b").generations == ()
    fleet.finish("a")
    assert fleet.order == ["a", "b"]
    fleet.finish("b")
    assert fleet.order == ["a", "b", "c"]


def test_a_worker_that_does_not_say_what_it_runs_is_bounded_by_its_prompts() -> None:
    fleet = Fleet("both", max_sequences=0, worker_prefill_tokens_max=25)
    fleet.ask("a", "b", "c", "d")
    assert fleet.order == ["a", "b", "c"]  # 30 tokens: the last one may go beyond
    fleet.first("b")
    assert fleet.order == ["a", "b", "c", "d"]


def test_requests_beyond_those_that_run_are_a_setting() -> None:
    fleet = Fleet("both", worker_waiting_max=2)
    fleet.ask("a", "b", "c", "d")
    assert fleet.order == ["a", "b", "c"]


def test_a_full_worker_is_passed_over_for_one_with_room() -> None:
    fleet = Fleet("both", "both", policy="local")
    prompt = request("a").token_ids
    fleet.holds(fleet.infos["w1"], prompt)
    fleet.ask("a", "b", "c")
    assert [fleet.running[name][0] for name in "ab"] == ["w1", "w0"]
    assert fleet.core.num_waiting == 1


@pytest.mark.parametrize("ends", ["finish", "cancel", "lost", "part"])
def test_every_end_makes_room(ends: str) -> None:
    fleet = Fleet("both", "both")
    fleet.ask("a", "b", "c", "d")
    assert fleet.order == ["a", "b"]
    who, submit = fleet.running["a"]
    if ends == "finish":
        fleet.finish("a")
    elif ends == "cancel":
        fleet.did(fleet.core.cancel(0, "a", "left"))
    elif ends == "lost":
        fleet.lost(fleet.infos[who])  # with no plan left it ends; what waits goes on
        fleet.finish("b")
    else:
        fleet.ended(fleet.infos[who], submit, EndReason.STEP_FAILED)
    assert fleet.order == ["a", "b", "c"]


def test_busy_prefill_workers_are_waited_for() -> None:
    """Its prefill would keep the decodes waiting: the decode worker does not do it alone."""
    fleet = Fleet("prefill", "decode", max_sequences=8, worker_prefill_tokens_max=10)
    fleet.ask("a", "b")
    assert {name for name, _ in fleet.submits} == set()
    assert fleet.order == ["a"]
    prefill = fleet.infos["w0"]
    fleet.tokens(prefill, fleet.running["a"][1], 10, 1)
    assert {name for name, _ in fleet.submits} == {"w0", "w1"}
    lone = Fleet("decode", max_sequences=8, worker_prefill_tokens_max=10)  # control
    lone.ask("a")
    assert lone.order == ["a"]


def test_a_worker_for_both_does_both_where_the_other_is_busy() -> None:
    fleet = Fleet("both", "both", max_sequences=8, worker_prefill_tokens_max=10)
    fleet.ask("a", "b", "c")
    assert fleet.order == ["a", "b"]
    assert fleet.record("b").generations[0].local


def test_who_floods_waits_behind_who_does_not() -> None:
    fleet = Fleet("both")
    fleet.ask(*(f"flood{n}" for n in range(50)), tenant="a")
    fleet.ask("one", "two", tenant="b")
    for _ in range(4):
        fleet.finish(fleet.order[-1])
    assert fleet.order == ["flood0", "one", "flood1", "two", "flood2"]
    same = Fleet("both")  # control: one tenant goes by arrival
    same.ask(*(f"flood{n}" for n in range(50)))
    same.ask("one", "two")
    for _ in range(4):
        same.finish(same.order[-1])
    assert same.order == [f"flood{n}" for n in range(5)]


def test_the_lowest_priority_of_a_tenant_goes_first_and_other_tenants_keep_their_turns() -> None:
    fleet = Fleet("both")
    fleet.ask("hold", tenant="z")
    for name, tenant, priority in [
        ("a-usual", "a", 0),
        ("a-late", "a", 5),
        ("b-late", "b", 9),
        ("a-soon", "a", -1),
        ("a-soon-too", "a", -1),
        ("b-later", "b", 10),
    ]:
        fleet.generate(replace(request(name, 10, 2, tenant=tenant), priority=priority))
    while len(fleet.order) < 7:
        fleet.finish(fleet.order[-1])
    of_a = [name for name in fleet.order if name.startswith("a")]
    assert of_a == ["a-soon", "a-soon-too", "a-usual", "a-late"]
    # b's are no later for a number that says nothing to others.
    assert fleet.order.index("b-late") < fleet.order.index("a-soon-too")
    assert fleet.order.index("b-later") < fleet.order.index("a-usual")


def test_tokens_count_not_requests() -> None:
    fleet = Fleet("both")
    fleet.ask("hold", tenant="z")
    fleet.ask(*(f"long{n}" for n in range(20)), tenant="a", num_tokens=100)
    fleet.ask(*(f"short{n}" for n in range(20)), tenant="b", num_tokens=10)
    while len(fleet.order) < 20:
        fleet.finish(fleet.order[-1])
    turns = Counter(name.rstrip("0123456789") for name in fleet.order)
    assert turns["short"] >= 7 * turns["long"]


def test_answers_count_as_they_are_given() -> None:
    fleet = Fleet("both", max_sequences=1)
    fleet.ask("talk0", "talk1", "talk2", tenant="a", max_tokens=500)
    who, submit = fleet.running["talk0"]
    for place in range(10, 400):
        fleet.tokens(fleet.infos[who], submit, place, 1)
    fleet.ask(*(f"b{n}" for n in range(9)), tenant="b")
    fleet.did(fleet.core.cancel(0, "talk0", "left"))
    while len(fleet.order) < 10:
        fleet.finish(fleet.order[-1])
    assert fleet.order[1:] == [f"b{n}" for n in range(9)]


def test_weights_are_parts_of_the_tokens() -> None:
    fleet = Fleet("both", tenant_weights={"gold": 4.0})
    fleet.ask("hold", tenant="z")
    for tenant in ("gold", "iron"):
        fleet.ask(*(f"{tenant}{n}" for n in range(60)), tenant=tenant)
    while len(fleet.order) < 51:
        fleet.finish(fleet.order[-1])
    turns = Counter(name.rstrip("0123456789") for name in fleet.order)
    assert 38 <= turns["gold"] <= 42


def test_a_full_router_refuses_who_fills_it() -> None:
    fleet = Fleet("both", requests_max=10)
    fleet.ask(*(f"flood{n}" for n in range(10)), tenant="a")
    with pytest.raises(CapacityError, match=r"limits\.requests_max"):
        fleet.ask("more", tenant="a")
    fleet.ask("one", tenant="b")  # the flood's newest gives its place up
    assert isinstance(fleet.error, CapacityError)
    assert fleet.error.request_id == "flood9"
    assert fleet.record("flood9").outcome == "failed"
    assert fleet.core.num_live == 10
    fleet.finish("flood0")
    assert fleet.order == ["flood0", "one"]


def test_a_full_router_takes_no_place_from_an_equal() -> None:
    fleet = Fleet("both", requests_max=5)
    fleet.ask("a0", "a1", "a2", tenant="a")
    fleet.ask("b0", "b1", tenant="b")
    with pytest.raises(CapacityError):
        fleet.ask("b2", tenant="b")
    assert fleet.core.num_live == 5


def test_a_waiting_request_can_be_cancelled_and_no_worker_hears_of_it() -> None:
    fleet = Fleet("both")
    fleet.ask("a", "b", "c")
    assert fleet.did(fleet.core.cancel(5, "b", "left")) == []
    assert fleet.record("b").outcome == "cancelled"
    fleet.finish("a")
    assert fleet.order == ["a", "c"]


def test_what_waits_expires_only_where_nothing_is_started() -> None:
    fleet = Fleet("both", request_timeout_ms=1000, worker_silent_ms=1 << 40)
    fleet.ask("a", "b", "c", max_tokens=9)
    fleet.now_ms = 900
    fleet.finish("a")  # b is started
    fleet.first("b")
    assert fleet.core.tick(1800) == []
    who, submit = fleet.running["b"]
    fleet.now_ms = 1850
    fleet.tokens(fleet.infos[who], submit, 11, 2)
    fails = fleet.did(fleet.core.tick(1901))
    assert [(type(f.error), f.request_id) for f in fails if isinstance(f, Fail)] == [
        (ExpiredError, "c")
    ]


def test_without_workers_what_waits_ends() -> None:
    fleet = Fleet("both")
    fleet.ask("a", "b")
    fleet.lost(fleet.infos["w0"])
    failed = {f.request_id: f.error for f in fleet.actions if isinstance(f, Fail)}
    assert {type(error) for error in failed.values()} == {RemoteFault}
    assert set(failed) == {"a", "b"}
    assert fleet.core.num_live == 0
    with pytest.raises(RemoteFault):
        fleet.ask("c")


def test_what_nobody_can_serve_does_not_wait() -> None:
    fleet = Fleet("both")
    fleet.ask("a")
    with pytest.raises(ContextLengthError):
        fleet.ask("b", max_tokens=2000)
    assert fleet.core.num_live == 1


EVENTS = st.one_of(
    st.tuples(
        st.just("ask"), st.sampled_from("abc"), st.integers(1, 60), st.sampled_from((2, 9, 30))
    ),
    st.tuples(st.sampled_from(("token", "cancel", "end")), st.integers(0, 50)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(EVENTS, max_size=80))
def test_whatever_comes_rooms_are_kept_and_used_and_each_tenant_goes_by_arrival(
    script: list[tuple[Any, ...]],
) -> None:
    limits = {"max_sequences": 2, "worker_prefill_tokens_max": 40}
    fleet = Fleet("both", "both", policy="local", **limits)
    tenants: dict[str, str] = {}
    places: dict[str, int] = {}

    def rooms() -> dict[str, tuple[int, int]]:
        at = {name: [one for one in fleet.running if fleet.running[one][0] == name]
              for name in fleet.infos}  # fmt: skip
        return {
            name: (
                len(ids),
                sum(len(fleet.running[one][1].token_ids) for one in ids if one not in places),
            )
            for name, ids in at.items()
        }

    def step(name: str, number: int) -> None:
        who, submit = fleet.running[name]
        place = places.setdefault(name, len(submit.token_ids))
        last = place + 1 == len(submit.token_ids) + submit.sampling.max_tokens or number == 0
        if last:
            del fleet.running[name]
        end = FinishReason.LENGTH if last else FinishReason.NONE
        fleet.tokens(fleet.infos[who], submit, place, 7, finish=end)
        places[name] = place + 1

    for event in script:
        if event[0] == "ask":
            _, tenant, num_tokens, max_tokens = event
            name = f"r{len(tenants)}"
            tenants[name] = tenant
            fleet.ask(name, num_tokens=num_tokens, tenant=tenant, max_tokens=max_tokens)
        elif fleet.running:
            name = sorted(fleet.running)[event[1] % len(fleet.running)]
            if event[0] == "cancel":
                del fleet.running[name]
                fleet.did(fleet.core.cancel(fleet.now_ms, name, "left"))
            else:
                step(name, 0 if event[0] == "end" else 1)
        for num, tokens in rooms().values():
            assert num <= 2
            assert tokens < 40 + 60
            # Nothing waits while there is room.
            assert not fleet.core.num_waiting or num == 2 or tokens >= 40
    while fleet.running:
        step(next(iter(fleet.running)), 0)
    assert fleet.core.num_live == 0
    assert sorted(fleet.order) == sorted(tenants)
    for tenant in "abc":
        mine = [int(name[1:]) for name in fleet.order if tenants[name] == tenant]
        assert mine == sorted(mine)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_who_wants_no_token_waits_where_its_prompt_has_room_for_one(policy: str) -> None:
    """A router whose queue no plan could be made of served nobody any more, and ended."""
    big = worker("big", max_model_tokens=1000, max_sequences=1)
    small = worker("small", max_model_tokens=50, max_sequences=9)
    router = Router(big, small, policy=policy, worker_waiting_max=0, requests_max=9)
    router.generate(request("long", 60, 30))
    scored = request("scored", 50, 0)
    router.generate(replace(scored, sampling=replace(scored.sampling, num_prompt_logprobs=0)))
    assert router.core.num_waiting == 1
    router.generate(request("other", 5, 5, tenant="other"))
    sent = [(name, submit.key.request_id) for name, submit in router.submits]
    assert ("small", "other") in sent
    assert ("small", "scored") not in sent
