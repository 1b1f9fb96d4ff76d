"""Requests of several routers at one worker: scoped, superseded, ended apart."""

from dataclasses import replace

from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.outputs import StepOutputs
from disagg.messages.sampling import SampledToken, SamplingParams
from disagg.messages.session import (
    Claim,
    EndReason,
    PartEnded,
    PrefixCacheReset,
    ResetPrefixCache,
    Superseded,
    router_of,
)
from disagg.messages.stats import RouterLoad
from disagg.messages.submit import PeerAddress, Role, Submit
from disagg.scheduling.actions import Drained, ToRouter, WorkerAction
from disagg.scheduling.claims import CLAIMS_MAX, TOGETHER_MS, Claims
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.draining import NOTICE_MS
from disagg.scheduling.stats import worker_stats
from disagg.scheduling.step import StepResult
from tests.unit.scheduling.test_cache_reset import core_with, reported

A, B = "a:1", "b:1"
NAME = b"n" * 16


def key(router: str, name: str = "r") -> RequestKey:
    return RequestKey(name, 1, router)


def submit(core: WorkerCore, one: RequestKey) -> list[WorkerAction]:
    prompt = (1, 2)
    return core.on_router_message(
        0, Submit(one, Role.LOCAL, prompt, (), b"", SamplingParams(max_tokens=4))
    )


def step(core: WorkerCore, now_ms: int = 0) -> list[WorkerAction]:
    planned, _ = core.next_step(now_ms)
    assert planned is not None
    samples = tuple(SampledToken(7) if part.sampling else None for part in planned.slices)
    return core.on_step_done(now_ms, StepResult(planned.step_id, samples))


def test_one_id_at_two_routers_is_two_requests_and_tokens_go_to_their_own() -> None:
    core = core_with()
    submit(core, key(A))
    submit(core, key(B))
    assert set(core.sequences) == {key(A), key(B)}
    outputs = reported(step(core), StepOutputs)
    assert [router_of(one) for one in outputs] == [A, B]
    assert [{output.key for output in one.outputs} for one in outputs] == [{key(A)}, {key(B)}]


def test_without_the_routers_in_the_keys_one_of_them_would_be_taken_for_a_repeated_submit() -> None:
    core = core_with()
    for router in (A, B):
        submit(core, key(router)._replace(router=""))
    assert len(core.sequences) == 1


def test_the_end_of_one_router_ends_only_what_it_asked_for() -> None:
    core = core_with()
    for router in (A, B):
        submit(core, key(router))
    core.on_router_lost(0, A)
    assert set(core.sequences) == {key(B)}
    core.on_router_lost(0, "of nobody")
    assert set(core.sequences) == {key(B)}
    core.on_router_lost(0, B)
    assert not core.sequences
    assert core.kv.num_free_blocks == core.kv.num_usable_blocks


def test_load_counts_whoever_causes_it() -> None:
    core = core_with()
    submit(core, key(A))
    assert worker_stats(core).num_waiting == 1
    submit(core, key(B))
    assert worker_stats(core).num_waiting == 2
    core.on_router_lost(0, A)
    assert worker_stats(core).num_waiting == 1


def test_each_routers_part_of_the_load_is_told() -> None:
    core = core_with()
    assert worker_stats(core).loads == ()
    submit(core, key(A))
    step(core)
    submit(core, key(B))
    assert worker_stats(core).loads == (RouterLoad(A, 1, 0), RouterLoad(B, 1, 2)), "a decodes"
    core.on_router_lost(0, B)
    assert worker_stats(core).loads == (RouterLoad(A, 1, 0),)


def test_a_part_that_only_prefills_is_no_request_of_this_worker() -> None:
    core = core_with()
    peer = PeerAddress(Incarnation("d", "1"), "127.0.0.1:1")
    sampling = SamplingParams(max_tokens=4)
    core.on_router_message(0, Submit(key(A), Role.PREFILL, (1, 2), (), b"", sampling, peer))
    assert worker_stats(core).loads == (RouterLoad(A, 0, 2),)


def test_a_later_claim_ends_the_earlier_request_and_tells_its_router() -> None:
    core = core_with()
    core.on_router_message(0, Claim(key(A), NAME, 10))
    submit(core, key(A))
    submit(core, key(A, "other"))
    step(core)
    actions = core.on_router_message(0, Claim(key(B), NAME, 11))
    assert actions == [ToRouter(Superseded(key(A)))]
    assert router_of(Superseded(key(A))) == A
    assert set(core.sequences) == {key(A, "other")}
    assert core.on_router_message(0, Claim(key(B), NAME, 11)) == [], "its own claim, repeated"
    anew = Claim(key(B)._replace(generation=9), NAME, 11, again=True)
    assert core.on_router_message(0, anew) == [], "of the same request"
    assert core.on_router_message(0, Claim(key(A), b"m" * 16)) == [], "another name"


def test_a_lost_router_has_no_claims() -> None:
    core = core_with()
    core.on_router_message(0, Claim(key(A), NAME))
    core.on_router_lost(0, A)
    assert core.on_router_message(0, Claim(key(B), NAME)) == []


def who_is_left(*arrivals: tuple[int, Claim]) -> set[str]:
    """Routers whose request is not superseded; claims with the times they arrive at one worker."""
    claims, left = Claims(), {claim.key.router for _, claim in arrivals}
    for now_ms, claim in arrivals:
        if superseded := claims.take(now_ms, claim):
            left.discard(superseded.router)
    return left


def test_of_two_that_come_together_one_is_left_at_all_workers_whatever_the_order_there() -> None:
    one, other = Claim(key(A), NAME, 10), Claim(key(B), NAME, 11)
    assert who_is_left((0, one), (1, other)) == who_is_left((0, other), (1, one)) == {B}
    same_ms = replace(one, accepted_ms=11)
    assert who_is_left((0, same_ms), (1, other)) == who_is_left((0, other), (1, same_ms)) == {B}


def test_what_is_sent_again_later_is_served_whatever_the_routers_clocks_say() -> None:
    early, late = Claim(key(A), NAME, 999_999), Claim(key(B), NAME, 10)
    assert who_is_left((0, early), (TOGETHER_MS, late)) == {B}
    assert who_is_left((0, early), (TOGETHER_MS - 1, late)) == {A}, "as if they came together"


def test_what_waited_at_its_router_takes_no_name_from_what_was_sent_again_meanwhile() -> None:
    """Whatever the clocks say; and what was sent again may have waited as well."""
    for first_ms, again_ms in ((10, 4_000), (4_000, 10)):
        waited = Claim(key(A), NAME, first_ms, waited_ms=9_000)
        again = Claim(key(B), NAME, again_ms)
        assert who_is_left((5_000, again), (9_000, waited)) == {B}
        at_once = replace(waited, waited_ms=0)
        assert who_is_left((5_000, again), (9_000, at_once)) == {A}, "the control"
        first, again_waited = replace(waited, waited_ms=10), replace(again, waited_ms=3_000)
        assert who_is_left((10, first), (9_000, again_waited)) == {B}


def test_what_is_planned_anew_takes_no_name_from_what_was_sent_again_since() -> None:
    """Its worker was lost, and with it the claim; where it goes on it comes as the later one."""
    first, again = Claim(key(A), NAME, 10), Claim(key(B), NAME, 5_000)
    anew = Claim(key(A)._replace(generation=2), NAME, 10, again=True)
    assert who_is_left((5_000, again), (9_000, anew)) == {B}
    as_new = replace(anew, again=False)
    assert who_is_left((5_000, again), (9_000, as_new)) == {A}, "the control: what it must not be"
    assert who_is_left((10, first), (5_000, again), (9_000, anew)) == {B}


def test_who_loses_a_name_by_its_own_claim_is_told_and_ends() -> None:
    core = core_with()
    core.on_router_message(0, Claim(key(B), NAME, 11))
    submit(core, key(B))
    submit(core, key(A))
    anew = Claim(key(A), NAME, 10, again=True)
    assert core.on_router_message(5_000, anew) == [ToRouter(Superseded(key(A)))]
    assert set(core.sequences) == {key(B)}


def test_claims_are_bounded() -> None:
    claims = Claims()
    for number in range(CLAIMS_MAX + 1):
        assert claims.take(0, Claim(key(A, str(number)), number.to_bytes(16, "big"))) is None
    assert len(claims) == CLAIMS_MAX
    late = 10 * TOGETHER_MS
    assert claims.take(late, Claim(key(B), bytes(16))) is None, "the oldest is forgotten"
    assert claims.take(late, Claim(key(B), (2).to_bytes(16, "big"))) == key(A, "2")
    claims.router_lost(A)
    claims.router_lost(B)
    assert not len(claims)


def test_a_reset_names_who_began_it_and_is_told_to_all() -> None:
    core = core_with()
    actions = core.on_router_message(0, ResetPrefixCache(3, A))
    (answer,) = reported(actions, PrefixCacheReset)
    assert (answer.number, answer.router) == (3, A)
    assert router_of(answer) == "", "to everybody"


# -- draining ---------------------------------------------------------------------------------


def drained(core: WorkerCore, now_ms: int) -> bool:
    return Drained() in core.tick(now_ms)


def test_what_runs_ends_first_and_new_work_is_refused_without_blame() -> None:
    core = core_with()
    submit(core, key(A))
    step(core)
    core.drain(0, 60_000)
    stats = worker_stats(core)
    assert stats.draining
    assert not stats.ready
    (refused,) = reported(submit(core, key(B)), PartEnded)
    assert (refused.key, refused.reason) == (key(B), EndReason.DRAINING)
    assert not drained(core, 30_000)
    for _ in range(3):
        step(core, 30_000)
    assert not core.sequences
    assert drained(core, 30_001)


def test_an_idle_worker_stays_until_routers_may_have_heard() -> None:
    core = core_with()
    core.drain(0, 60_000)
    assert not drained(core, NOTICE_MS - 1)
    assert drained(core, NOTICE_MS)


def test_what_still_runs_at_the_end_of_its_time_is_planned_anew() -> None:
    core = core_with()
    submit(core, key(A))
    core.drain(0, 1_000)
    assert core.tick(749) == []
    (ended,) = reported(core.tick(750), PartEnded)  # the last quarter is for moving
    assert (ended.key, ended.reason) == (key(A), EndReason.DRAINING)
    assert drained(core, 751)


def test_asked_twice_its_time_does_not_begin_anew() -> None:
    core = core_with()
    submit(core, key(A))
    core.drain(0, 1_000)
    core.drain(900, 1_000)
    assert reported(core.tick(1_000), PartEnded)


def test_a_worker_that_was_not_asked_goes_on() -> None:
    core = core_with()
    assert not drained(core, 10**9)
    assert replace(worker_stats(core), draining=True) != worker_stats(core)
