"""Who is chosen, and that the reason says why."""

from dataclasses import replace

import pytest

from disagg.messages.registration import WorkerInfo
from disagg.messages.session import EndReason
from disagg.messages.stats import WorkerStats
from disagg.messages.submit import PeerAddress, PullPlan, Role
from disagg.routing.actions import NewRequest
from tests.unit.routing.builders import CONTRACT, STATS, Router, request, worker

PROMPT = tuple(range(100, 141))
LONG = request(num_tokens=41)


def planned(router: Router, new: NewRequest | None = None) -> tuple[str, str, str]:
    """Names of the prefill and the decode worker, and the reason."""
    router.generate(new)
    (generation,) = router.record((new or request()).request_id).generations
    return generation.prefill.worker_id, generation.decode.worker_id, generation.reason


def test_the_longest_usable_prefix_prefills_whatever_its_queue() -> None:
    router = Router(worker("p1", "prefill"), worker("p2", "prefill"), worker("d", "decode"))
    router.holds(worker("p2"), PROMPT)
    router.core.from_worker(0, worker("p2").incarnation, replace(STATS, num_waiting=3))
    prefill, decode, reason = planned(router, LONG)
    assert (prefill, decode) == ("p2", "d")
    assert "prefix 40 tokens" in reason


def test_a_prefix_without_its_window_counts_as_none() -> None:
    router = Router(worker("p1", "prefill"), worker("p2", "prefill"), worker("d", "decode"))
    router.holds(worker("p2"), PROMPT, groups=1)
    assert planned(router, LONG)[0] == "p1"


@pytest.mark.parametrize(
    "stats", [replace(STATS, num_prefill_tokens_queued=9), replace(STATS, num_waiting=1)]
)
def test_then_the_shortest_prefill_queue(stats: WorkerStats) -> None:
    router = Router(worker("p1", "prefill"), worker("p2", "prefill"), worker("d", "decode"))
    router.core.from_worker(0, worker("p1").incarnation, stats)
    assert planned(router)[0] == "p2"


def test_what_was_planned_since_the_last_stats_counts() -> None:
    router = Router(worker("p1", "prefill"), worker("p2", "prefill"), worker("d", "decode"))
    assert planned(router)[0] == "p1"
    assert planned(router, request("r2"))[0] == "p2"


def test_the_decode_worker_has_the_shortest_queue_then_the_most_free_blocks() -> None:
    router = Router(worker("p", "prefill"), worker("d1", "decode"), worker("d2", "decode"))
    router.core.from_worker(0, worker("d1").incarnation, replace(STATS, num_running=2))
    router.core.from_worker(0, worker("d2").incarnation, replace(STATS, num_blocks_free=1))
    assert planned(router)[1] == "d2"
    for name, free in (("d1", 10), ("d2", 11)):
        stats = replace(STATS, num_blocks_free=free)
        router.core.from_worker(0, worker(name).incarnation, stats)
    assert planned(router, request("r2"))[1] == "d2"


def test_a_tie_among_decode_workers_goes_to_the_longer_prefix() -> None:
    router = Router(worker("p", "prefill"), worker("d1", "decode"), worker("d2", "decode"))
    router.holds(worker("d2"), PROMPT, groups=1)
    assert planned(router, LONG)[1] == "d2"


@pytest.mark.parametrize(
    ("workers", "why"),
    [
        ([worker("a", "prefill")], "only worker"),
        ([worker("a"), worker("b")], "best for prefill and for decode"),
        ([worker("a", "prefill"), worker("b", "prefill")], "no decode worker"),
        ([worker("a", "decode"), worker("b", "decode")], "no prefill worker"),
        ([worker("a", "prefill", handover_tokens_max=9), worker("b", "decode")], "too many"),
        ([worker("a", "prefill"), worker("b", "decode", handover_tokens_max=9)], "too many"),
    ],
)
def test_local_when_nothing_can_or_need_be_handed_over(workers: list[WorkerInfo], why: str) -> None:
    router = Router(*workers)
    prefill, decode, reason = planned(router)
    assert prefill == decode == "a"
    assert why in reason
    assert [submit.role for _, submit in router.submits] == [Role.LOCAL]


@pytest.mark.parametrize(("tokens_max", "prefill"), [(10, "b"), (11, "a"), (14, "a"), (15, "a")])
def test_who_holds_the_prompt_may_prefill_and_who_holds_all_of_it_decodes(
    tokens_max: int, prefill: str
) -> None:
    router = Router(worker("a", max_model_tokens=tokens_max), worker("b", max_model_tokens=15))
    decode = "a" if tokens_max == 15 else "b"
    assert planned(router)[:2] == (prefill, decode)


def test_equal_inputs_give_equal_plans() -> None:
    def run() -> list[tuple[str, str, str]]:
        router = Router(*(worker(name) for name in ("c", "a", "b")))
        return [planned(router, request(f"r{i}")) for i in range(6)]

    assert run() == run()


def pull_of(router: Router, name: str) -> PullPlan | None:
    """What the submit to a worker says."""
    (submit,) = [submit for to, submit in router.submits if to == name]
    return submit.pull


def three(*, pull_tokens_min: int = 16) -> Router:
    workers = worker("p", "prefill"), worker("d1", "decode"), worker("d2", "decode")
    return Router(*workers, pull_tokens_min=pull_tokens_min)


def test_what_another_worker_has_more_of_is_pulled() -> None:
    router = three()
    router.holds(worker("p"), PROMPT[:8])
    router.holds(worker("d2"), PROMPT[:24])
    router.core.from_worker(0, worker("d2").incarnation, replace(STATS, num_running=2))
    prefill, decode, reason = planned(router, LONG)
    assert (prefill, decode) == ("p", "d1")
    owner = PeerAddress(worker("d2").incarnation, "d2:1")
    assert pull_of(router, "p") == PullPlan(owner, 24)
    assert pull_of(router, "d1") is None
    assert "pulls 16 more tokens of the prefix from d2" in reason


def test_the_owner_may_be_the_decode_worker_of_the_same_generation() -> None:
    router = Router(worker("p", "prefill"), worker("d", "decode"), pull_tokens_min=16)
    router.holds(worker("d"), PROMPT)
    assert planned(router, LONG)[:2] == ("p", "d")
    pull = pull_of(router, "p")
    assert pull is not None
    assert pull.owner.incarnation == worker("d").incarnation


def test_the_owner_with_the_most_then_the_least_load() -> None:
    router = three()
    router.holds(worker("d1"), PROMPT[:24])
    router.holds(worker("d2"), PROMPT[:28])
    planned(router, LONG)
    assert pull_of(router, "p").owner.incarnation.worker_id == "d2"  # type: ignore[union-attr]
    router = three()
    router.holds(worker("d1"), PROMPT)
    router.holds(worker("d2"), PROMPT)
    router.core.from_worker(0, worker("d1").incarnation, replace(STATS, num_running=2))
    planned(router, LONG)
    assert pull_of(router, "p").owner.incarnation.worker_id == "d2"  # type: ignore[union-attr]


@pytest.mark.parametrize("tokens_min", [16, 17])
def test_too_little_is_computed_instead(tokens_min: int) -> None:
    router = three(pull_tokens_min=tokens_min)
    router.holds(worker("d1"), PROMPT[:16])
    planned(router, LONG)
    assert (pull_of(router, "p") is None) == (tokens_min == 17)


def test_a_pair_that_failed_is_not_pulled_over() -> None:
    router = three()
    router.holds(worker("d1"), PROMPT)
    planned(router, LONG)
    (submit,) = [one for to, one in router.submits if to == "d1"]
    router.ended(worker("d1"), submit, EndReason.READ_FAILED)  # p and d1 are a bad pair now
    router.generate(request("r2", num_tokens=41))
    assert pull_of(router, "p") is None


def test_who_failed_the_request_is_not_pulled_from() -> None:
    router = three()
    router.holds(worker("d2"), PROMPT)
    assert planned(router, LONG)[:2] == ("p", "d2")
    assert pull_of(router, "p") is not None
    router.ended(worker("d2"), router.submits[0][1], EndReason.STEP_FAILED)
    assert [who for who, _ in router.submits] == ["d1", "p"]
    assert pull_of(router, "p") is None


def test_another_contract_is_not_pulled_from() -> None:
    other = replace(CONTRACT, page_format="another")
    other_worker = worker("b", contract=other)
    router = Router(
        worker("p", "prefill"),
        worker("d", "decode"),
        other_worker,
        pull_tokens_min=16,
        accept_unlike_workers=True,
    )
    router.holds(other_worker, PROMPT)
    planned(router, LONG)
    assert all(submit.pull is None for _, submit in router.submits)
