"""The rules of other systems: each hands over or prefills at the decode worker as it says."""

from dataclasses import replace

import pytest

from disagg.messages.submit import Role
from tests.unit.routing.builders import STATS, Router, request, worker

P, P2 = (worker(name, "prefill", num_blocks=1000) for name in ("p", "p2"))
D, D2 = (worker(name, "decode", num_blocks=1000) for name in ("d", "d2"))
LONG = tuple(range(100, 501))


def served(router: Router, num_tokens: int = 401) -> dict[str, Role]:
    router.generate(request(num_tokens=num_tokens))
    return {who: submit.role for who, submit in router.submits}


HANDED_OVER = {"p": Role.PREFILL, "d": Role.DECODE}
LOCAL = {"d": Role.LOCAL}


@pytest.mark.parametrize("policy", ["uncached_threshold", "uncached_or_load"])
def test_a_threshold_counts_what_the_decode_worker_lacks(policy: str) -> None:
    for tokens_max, held, expected in (
        (100, 0, HANDED_OVER),
        (100, 300, HANDED_OVER),  # 101 are left
        (101, 300, LOCAL),
        (401, 0, LOCAL),
        (0, 400, HANDED_OVER),
    ):
        router = Router(P, D, policy=policy, uncached_tokens_max=tokens_max, pull_tokens_min=999)
        router.holds(D, LONG[:held])
        assert served(router) == expected, (tokens_max, held)


def test_the_share_must_be_kept_as_well() -> None:
    for share, expected in ((0.2, HANDED_OVER), (0.3, LOCAL)):
        router = Router(
            P,
            D,
            policy="uncached_threshold",
            uncached_tokens_max=500,
            uncached_share_max=share,
            pull_tokens_min=999,
        )
        router.holds(D, LONG[:300])
        assert served(router) == expected, share


def test_the_decode_worker_that_holds_most_is_asked() -> None:
    router = Router(P, D, D2, policy="uncached_threshold", uncached_tokens_max=101)
    router.holds(D2, LONG[:300])
    router.core.from_worker(0, D2.incarnation, replace(STATS, num_running=7))
    assert served(router) == {"d2": Role.LOCAL}


@pytest.mark.parametrize("policy", ["prefill_load", "uncached_or_load"])
def test_busy_prefill_workers_are_gone_round(policy: str) -> None:
    for queued, other, free, expected in (
        (100, 500, 100, HANDED_OVER),
        (101, 500, 100, LOCAL),
        (101, 100, 100, {"p2": Role.PREFILL, "d": Role.DECODE}),  # one is not busy
        (101, 500, 9, HANDED_OVER),  # the decode worker is
    ):
        router = Router(
            P,
            P2,
            D,
            policy=policy,
            uncached_tokens_max=0,
            prefill_busy_tokens=100,
            decode_busy_share=0.9,
        )
        for who, tokens in ((P, queued), (P2, other)):
            stats = replace(STATS, num_prefill_tokens_queued=tokens)
            router.core.from_worker(0, who.incarnation, stats)
        router.core.from_worker(0, D.incarnation, replace(STATS, num_blocks_free=free))
        assert served(router) == expected, (queued, other, free)


def test_affinity_weighs_a_prefix_against_a_queue() -> None:
    for weight, queued, expected in (
        (1.0, 250, "p"),
        (1.0, 350, "p2"),
        (2.0, 350, "p"),
        (0.0, 1, "p2"),
    ):
        router = Router(P, P2, D, policy="cache_affinity", affinity_weight=weight)
        router.holds(P, LONG[:300])
        stats = replace(STATS, num_prefill_tokens_queued=queued)
        router.core.from_worker(0, P.incarnation, stats)
        assert served(router) == {expected: Role.PREFILL, "d": Role.DECODE}, (weight, queued)
        assert not [submit.pull for _, submit in router.submits if submit.pull]
