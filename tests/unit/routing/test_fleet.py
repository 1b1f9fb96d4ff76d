"""Registrations, liveness, events and look-ups, on the production core."""

from dataclasses import replace

import pytest

from disagg.errors import ConfigError, RemoteFault, WorkerIdTakenError
from disagg.messages.identity import Incarnation
from disagg.messages.kv_events import BlocksRemoved, BlocksStored
from disagg.messages.registration import Contract, WorkerInfo
from disagg.messages.session import EndReason, WorkerIdClaimed
from disagg.messages.stats import RouterLoad
from disagg.messages.submit import PeerAddress, Role
from disagg.routing import bad_pairs, fleet, worker_lives
from disagg.routing.actions import Connect, RefuseRegistration, RouterAction, ToWorker
from disagg.routing.worker import turn_of
from tests.unit.routing.builders import (
    CONTRACT,
    FULL,
    STATS,
    Router,
    hashes_of,
    request,
    worker,
)

P, D = worker("p", "prefill"), worker("d", "decode")
PROMPT = tuple(range(100, 141))


def test_a_heartbeat_connects_once() -> None:
    router = Router()
    assert router.core.register(0, P) == [Connect(P)]
    assert router.core.register(5, P) == []
    assert router.core.fleet[0].heard_ms == 5


def test_ready_needs_session_and_stats() -> None:
    router = Router()
    router.core.register(0, P)
    router.core.from_worker(0, P.incarnation, STATS)  # of a session that is not open yet
    with pytest.raises(RemoteFault):
        router.generate()
    router = Router()
    router.core.register(0, P)
    router.core.session_up(0, P.incarnation)
    assert not router.core.ready
    router.core.from_worker(0, P.incarnation, STATS)
    assert router.core.ready
    router.core.from_worker(0, P.incarnation, replace(STATS, ready=False))
    with pytest.raises(RemoteFault):
        router.generate()


def test_a_lost_session_is_connected_anew_by_the_next_heartbeat() -> None:
    router = Router(P)
    router.lost(P)
    assert router.disconnected == [P.incarnation]
    assert router.core.fleet == ()
    assert router.lost(P) == []
    assert router.core.register(1, P) == [Connect(P)]


def test_a_silent_worker_is_dropped_and_any_message_counts() -> None:
    router = Router(P, D)
    router.core.from_worker(90, D.incarnation, STATS)
    router.did(router.core.tick(100))
    assert router.disconnected == []
    router.did(router.core.tick(101))
    assert router.disconnected == [P.incarnation]
    assert router.core.counters["workers_lost", "silent"] == 1


def test_an_opened_session_counts_as_heard() -> None:
    router = Router()
    router.core.register(0, P)
    router.core.session_up(90, P.incarnation)
    assert router.did(router.core.tick(190)) == []
    router.did(router.core.tick(191))
    assert router.disconnected == [P.incarnation]


def test_a_heartbeat_with_new_limits_counts_as_heard() -> None:
    router = Router(P)
    assert router.core.register(90, replace(P, max_model_tokens=7)) == []
    assert router.core.tick(190) == []
    assert router.core.max_model_tokens == 7


def test_the_number_of_workers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "WORKERS_MAX", 2)
    router = Router(P, D)
    with pytest.raises(ConfigError, match="more than 2 workers"):
        router.core.register(0, worker("x"))
    assert router.core.register(1, P) == []
    router.lost(D)
    assert router.core.register(1, worker("d", "decode", epoch="e2")) != []


def taken(router: Router, info: WorkerInfo, now_ms: int = 1) -> str:
    """Why a registration is refused; it changes nothing but what the holder is told."""
    fleet_before = [replace(view, heard_ms=0) for view in router.core.fleet]
    actions = router.core.register(now_ms, info)
    assert [replace(view, heard_ms=0) for view in router.core.fleet] == fleet_before
    (refused,) = [action for action in actions if isinstance(action, RefuseRegistration)]
    assert isinstance(refused.error, WorkerIdTakenError)
    return refused.error.message


def claims(actions: list[RouterAction]) -> list[tuple[Incarnation, object]]:
    return [(action.worker, action.message) for action in actions if isinstance(action, ToWorker)]


def test_the_id_of_a_live_worker_is_not_taken() -> None:
    router = Router(P, D, worker_silent_ms=100)
    other = replace(worker("p", "prefill", epoch="e2"), address="elsewhere:1")
    actions = router.core.register(1, other)
    told = WorkerIdClaimed(PeerAddress(other.incarnation, "elsewhere:1"))
    assert claims(actions) == [(P.incarnation, told)]
    why = taken(router, other)
    assert P.address in why
    assert "elsewhere:1" in why
    # It tries again with every heartbeat; the holder is not told as often.
    assert claims(router.core.register(100, other)) == []
    assert claims(router.core.register(101, other)) == [(P.incarnation, told)]
    assert router.core.counters["registrations_refused", "worker_id_taken"] == 4
    assert router.core.register(102, P) == []  # the holder's heartbeat counts as ever
    assert router.core.ready


@pytest.mark.parametrize("how", ["session", "silence"])
def test_the_next_life_gets_in_when_the_one_before_has_gone(how: str) -> None:
    router = Router(P, D, worker_silent_ms=100)
    successor = worker("p", "prefill", epoch="e2")
    taken(router, successor)
    if how == "session":
        router.lost(P)
    else:
        router.did(router.core.tick(102))
    assert router.core.register(102, successor) == [Connect(successor)]
    # The one before it, cut off for a while, has no way back and is told so.
    router.core.session_up(102, successor.incarnation)
    assert "is alive" in taken(router, P)
    router.lost(successor)
    assert "has to end" in taken(router, P)
    assert router.core.register(103, successor) == [Connect(successor)]


def test_an_id_is_held_while_its_session_is_being_opened() -> None:
    router = Router()
    router.core.register(0, P)
    actions = router.core.register(1, worker("p", "prefill", epoch="e2"))
    assert [type(action) for action in actions] == [RefuseRegistration]  # there is nobody to tell


def test_old_lives_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_lives, "RETIRED_MAX", 1)
    router = Router(P, D)
    second = worker("p", "prefill", epoch="e2"), worker("d", "decode", epoch="e2")
    for first, then in zip((P, D), second, strict=True):
        router.lost(first)
        router.join(then)
    for info in second:
        router.lost(info)
    taken(router, D)
    assert router.core.register(1, P) == [Connect(P)]  # forgotten: it is taken for a new life
    monkeypatch.setattr(worker_lives, "LATEST_MAX", 2)
    router = Router()
    for info in (P, D, worker("x")):  # the life of p is forgotten for that of x
        router.join(info)
        router.lost(info)
    router.join(worker("p", "prefill", epoch="e2"))
    router.lost(worker("p", epoch="e2"))
    assert router.core.register(1, P) == [Connect(P)]
    router.join(worker("x", epoch="e2"))
    router.lost(worker("x", epoch="e2"))
    taken(router, worker("x"))


def test_the_life_that_was_seen_last_is_remembered_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_lives, "LATEST_MAX", 2)
    router = Router()
    second, third = (worker("p", "prefill", epoch=epoch) for epoch in ("e2", "e3"))
    for info in (P, D, second, worker("x"), third):  # x takes the place of d, not of p
        router.join(info)
        router.lost(info)
    taken(router, second)


def test_who_was_followed_by_a_life_that_is_forgotten_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_lives, "LATEST_MAX", 1)
    router = Router()
    for info in (P, worker("p", "prefill", epoch="e2"), D):
        router.join(info)
        router.lost(info)
    assert "another one has taken its place" in taken(router, P)


def test_an_index_goes_with_its_last_worker() -> None:
    contract = replace(CONTRACT, groups=("full",), page_format="another")
    other = worker("x", groups=(FULL,), contract=contract)
    router = Router(P, other, accept_unlike_workers=True)
    router.lost(other)
    assert list(router.core._fleet._indexes) == [("default", P.groups)]


def test_pairs_that_rest_are_bounded_and_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bad_pairs, "BAD_PAIRS_MAX", 1)
    router = Router(P, D, worker("d2", "decode"), worker_silent_ms=100)

    def fails_to(name: str, request_id: str) -> None:
        """The next hand-over goes to that worker, and fails."""
        for view in router.core.fleet:  # nobody is loaded
            router.core.from_worker(router.now_ms, view.info.incarnation, STATS)
        router.generate(request(request_id))
        who, submit = router.submits[0]
        assert (who, len(router.submits)) == (name, 2)
        router.ended(worker(who, "decode"), submit, EndReason.READ_FAILED)

    fails_to("d", "r1")
    fails_to("d2", "r2")
    fails_to("d2", "r3")  # there was no room to note it
    router.now_ms = 101
    fails_to("d", "r4")
    fails_to("d2", "r5")


@pytest.mark.parametrize(
    ("contract", "named"),
    [
        (replace(CONTRACT, model_fingerprint="b"), "model_fingerprint: revision 'model-a', x 'b'"),
        (replace(CONTRACT, hash_scheme="b"), "hash_scheme: revision 'sha256-chain-v1', x 'b'"),
        (replace(CONTRACT, hash_block_tokens=8), "hash_block_tokens: revision 4, x 8"),
        (replace(CONTRACT, dtype="b"), "workers x and p .*: dtype: 'b' != 'float32'"),
    ],
)
def test_another_model_is_refused_with_both_values(contract: Contract, named: str) -> None:
    router = Router(P)
    with pytest.raises(ConfigError, match=named):
        router.core.register(0, worker("x", contract=contract))
    assert len(router.core.fleet) == 1


def test_unknown_kinds_and_roles_are_refused() -> None:
    router = Router()
    with pytest.raises(ConfigError, match="telepathy"):
        router.core.register(0, worker("x", groups=(replace(FULL, kind="telepathy"),)))
    with pytest.raises(ConfigError, match="boss"):
        router.core.register(0, worker("x", "boss"))
    assert router.core.fleet == ()
    assert router.core.revision_views() == ()


def test_a_role_can_change_but_not_the_contract() -> None:
    router = Router(P)
    assert router.core.register(1, replace(P, role="decode")) == []
    assert router.core.fleet[0].info.role == "decode"
    with pytest.raises(ConfigError, match="epoch"):
        router.core.register(1, replace(P, contract=replace(CONTRACT, dtype="bfloat16")))


def test_unequal_pages_are_never_paired() -> None:
    contract = replace(CONTRACT, page_format="another", num_ranks=2)
    other = worker("d", "decode", contract=contract)
    router = Router(P, other, accept_unlike_workers=True)
    router.generate()
    assert len(router.submits) == 1
    control = Router(P, D)
    control.generate()
    assert len(control.submits) == 2


def test_releases_pair_if_their_layouts_are_of_one_version() -> None:
    def pairs(ours: Contract, theirs: Contract) -> bool:
        router = Router(
            worker("p", "prefill", contract=ours),
            worker("d", "decode", contract=theirs),
            accept_unlike_workers=True,
        )
        router.generate()
        return len(router.submits) == 2

    ours = replace(CONTRACT, layout_version=1)
    assert pairs(ours, replace(ours))
    changed = replace(ours, layout_version=2)
    assert not pairs(ours, changed)
    assert not pairs(ours, replace(ours, layout_version=0))  # from before layouts had versions
    said = ours.refusal("p", changed, "d")
    assert "layout_version: 1 != 2" in said
    assert all(f"{name}: {contract}" in said for name, contract in (("p", ours), ("d", changed)))
    assert ours.refusal("p", replace(ours), "d") == ""


def test_events_reach_the_look_up_and_a_gap_asks_for_more() -> None:
    router = Router(P, D)
    router.holds(P, PROMPT)
    best, none = router.core.match(router.core.assign("r"), len(PROMPT), hashes_of(PROMPT))
    assert (best.worker, best.usable_tokens, best.group_tokens) == (P.incarnation, 40, (40, 40))
    assert (none.worker, none.usable_tokens) == (D.incarnation, 0)
    events = [BlocksRemoved(1, hashes_of(PROMPT)[-1:])]
    assert not router.core.kv_events(P.incarnation, "e1", 7, None, events)
    assert router.core.kv_sequence(P.incarnation) == 2
    assert router.core.counters["kv_event_gaps", ""] == 1
    assert not router.core.kv_events(P.incarnation, "other epoch", 2, None, events)
    assert router.core.kv_events(P.incarnation, "e1", 2, None, events)
    assert (
        router.core.match(router.core.assign("r"), len(PROMPT), hashes_of(PROMPT))[0].usable_tokens
        == 36
    )


def test_a_lost_worker_takes_its_blocks_along() -> None:
    router = Router(P, D)
    router.holds(P, PROMPT)
    router.lost(P)
    router.join(P)
    assert [
        m.usable_tokens
        for m in router.core.match(router.core.assign("r"), len(PROMPT), hashes_of(PROMPT))
    ] == [0, 0]
    assert router.core.kv_sequence(P.incarnation) == 0


def test_layouts_that_differ_are_indexed_apart() -> None:
    contract = replace(CONTRACT, groups=("full",), page_format="another")
    other = worker("x", groups=(FULL,), contract=contract)
    router = Router(P, other, accept_unlike_workers=True)
    stored = [BlocksStored(0, hashes_of(PROMPT), None, 0, 4)]
    for info in (P, other):
        assert router.core.kv_events(info.incarnation, "e1", 0, None, stored)
    found = {
        m.worker.worker_id: m
        for m in router.core.match(router.core.assign("r"), len(PROMPT), hashes_of(PROMPT))
    }
    assert (found["p"].usable_tokens, found["p"].group_tokens) == (0, (40, 0))
    assert (found["x"].usable_tokens, found["x"].group_tokens) == (40, (40,))


@pytest.mark.parametrize(
    ("sizes", "longest", "usual"),
    [
        ({}, 0, 0),
        ({"both": (100, 96, 90)}, 100, 90),
        ({"both": (100, 50, 49)}, 100, 50),  # less than half: not for requests without a bound
        ({"prefill": (200,), "decode": (100, 90)}, 200, 90),
        ({"prefill": (200, 190)}, 200, 190),
    ],
)
def test_the_length_that_can_be_served(
    sizes: dict[str, tuple[int, ...]], longest: int, usual: int
) -> None:
    router = Router()
    for role, limits in sizes.items():
        for limit in limits:
            router.join(worker(f"{role}-{limit}", role, max_model_tokens=limit))
    router.core.register(0, worker("not ready", max_model_tokens=10_000))
    assert router.core.max_model_tokens == longest
    if sizes:
        revision = router.core.assign("r")
        assert router.core.max_model_tokens_of(revision) == longest
        assert router.core.default_model_tokens_of(revision) == usual


def test_the_view_counts_what_runs_and_what_is_planned() -> None:
    router = Router(P, D)
    router.generate(request(num_tokens=30))
    decode, prefill = router.core.fleet
    assert (prefill.num_live, prefill.planned_requests, prefill.planned_tokens) == (1, 1, 30)
    assert (decode.num_live, decode.planned_requests, decode.planned_tokens) == (1, 1, 0)
    router.core.from_worker(0, P.incarnation, STATS)
    assert router.core.fleet[1].planned_tokens == 0


def test_of_its_own_prompts_a_router_need_not_wait_for_stats() -> None:
    """Stats of a large fleet are up to a second old; those of others are known by nothing else."""
    assert turn_of("router", "p") < turn_of("router", "p2"), "of equal ones the first"
    router = Router(P, worker("p2", "prefill"), D, router_id="router")

    def say(name: str, num_tokens: int, *loads: RouterLoad) -> None:
        stats = replace(STATS, num_prefill_tokens_queued=num_tokens, loads=loads)
        router.core.from_worker(router.now_ms, worker(name).incarnation, stats)

    def goes_to(name: str) -> str:
        router.generate(request(name, num_tokens=10))
        found = [who for who, submit in router.submits if submit.role is Role.PREFILL]
        return found[0]

    assert goes_to("first") == "p"
    submit = next(submit for who, submit in router.submits if who == "p")
    say("p", 40, RouterLoad("router", 1, 10), RouterLoad("other", 3, 30))
    say("p2", 35, RouterLoad("other", 3, 35))
    assert goes_to("second") == "p2", "it has less to do"
    say("p2", 35, RouterLoad("other", 3, 35))
    router.tokens(P, submit, 10, 1)
    assert goes_to("third") == "p", "30 tokens are left there"
    say("p", 40, RouterLoad("other", 4, 40))
    assert goes_to("fourth") == "p2", "control: of others' prompts it knows what stats say"
