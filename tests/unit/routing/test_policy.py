"""Who is chosen, and that the reason says why."""

from dataclasses import replace

import pytest

from disagg.routing.messages import NewRequest, WorkerInfo
from disagg.scheduling.messages import Role, WorkerStats
from tests.unit.routing.builders import STATS, Router, request, worker

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


def test_a_worker_too_small_for_the_request_is_passed_over() -> None:
    router = Router(worker("a", max_model_tokens=14), worker("b", max_model_tokens=15))
    assert planned(router)[:2] == ("b", "b")


def test_equal_inputs_give_equal_plans() -> None:
    def run() -> list[tuple[str, str, str]]:
        router = Router(*(worker(name) for name in ("c", "a", "b")))
        return [planned(router, request(f"r{i}")) for i in range(6)]

    assert run() == run()
