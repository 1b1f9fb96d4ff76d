"""Plans with tiers: who loads what others would compute, and when that is not worth it."""

from dataclasses import replace

import pytest

from disagg.messages.kv_events import TierCleared
from disagg.messages.registration import TierInfo, WorkerInfo
from disagg.messages.session import EndReason
from disagg.messages.stats import WorkerStats
from disagg.routing.policy import candidates
from disagg.routing.policy.candidates import LOADERS_MAX
from disagg.routing.policy.registry import POLICIES
from disagg.routing.prefix_hits import PrefixHits
from tests.unit.routing.builders import CONTRACT, STATS, Router, request, worker
from tests.unit.routing.test_policy import planned

TIERS = (TierInfo("host", 100), TierInfo("disk", 100))
LONG = request(num_tokens=41)
PROMPT = LONG.token_ids
P = worker("p", "prefill")
D = worker("d", "decode", tiers=TIERS)


def pair(*others: WorkerInfo, tokens_max: int = 16, tokens_min: int = 8) -> Router:
    return Router(P, D, *others, decode_prefill_tokens_max=tokens_max, pull_tokens_min=tokens_min)


def measured(us_per_block: int, us_per_token: int, tier: str = "host") -> WorkerStats:
    """What a worker says of how fast it loads and computes."""
    counts = {
        f"tier_read_us_{tier}": 50 * us_per_block,
        f"tier_read_{tier}": 45,
        f"tier_missed_{tier}": 5,
        "prefill_step_us": 1000 * us_per_token,
        "prefill_step_tokens": 1000,
    }
    return replace(STATS, counters=tuple(counts.items()))


def test_a_decode_worker_whose_tiers_have_the_prompt_serves_it_alone() -> None:
    router = pair()
    router.tier_holds(D, PROMPT)
    prefill, decode, reason = planned(router, LONG)
    assert (prefill, decode) == ("d", "d")
    # 40 tokens: ten blocks of full attention, and of windows of nine tokens two.
    assert "prefix 40 tokens" in reason
    assert "it loads 12 blocks from host" in reason
    (generation,) = router.record("r").generations
    assert generation.expected_hit_tokens == 40


@pytest.mark.parametrize(
    ("changed", "alone"),
    [
        ({}, True),
        ({"tokens_max": 12}, False),  # 13 tokens are left
        ({"tokens_max": 13}, True),
        ({"tokens_max": 0}, False),
        ({"tokens_min": 29}, False),
    ],
)
def test_how_much_it_must_have_and_may_leave(changed: dict[str, int], alone: bool) -> None:
    router = pair(**changed)
    router.tier_holds(D, PROMPT[:28])
    assert planned(router, LONG)[:2] == (("d", "d") if alone else ("p", "d"))


def test_what_the_prefill_worker_has_is_not_loaded_elsewhere() -> None:
    router = pair()
    router.holds(P, PROMPT[:36])
    router.tier_holds(D, PROMPT)
    assert planned(router, LONG)[:2] == ("p", "d")


def test_control_the_pool_of_a_decode_worker_is_pulled_from_as_ever() -> None:
    router = pair()
    router.holds(D, PROMPT)
    assert planned(router, LONG)[:2] == ("p", "d")


@pytest.mark.parametrize(("us_per_block", "alone"), [(1000, True), (3000, False)])
def test_loading_has_its_price(us_per_block: int, alone: bool) -> None:
    """Twelve blocks take as long as 12 or 36 tokens of prefill do."""
    router = pair()
    router.tier_holds(D, PROMPT)
    router.core.from_worker(0, D.incarnation, measured(us_per_block, 1000))
    assert planned(router, LONG)[:2] == (("d", "d") if alone else ("p", "d"))


def test_each_block_is_loaded_from_the_first_tier_that_has_it() -> None:
    router = pair()
    router.tier_holds(D, PROMPT, tier=1)
    router.tier_holds(D, PROMPT[:20], groups=1)
    reason = planned(router, LONG)[2]
    assert "it loads 5 blocks from host, 7 blocks from disk" in reason


def test_who_is_excluded_does_not_load() -> None:
    router = pair(worker("d2", "decode"))
    router.tier_holds(D, PROMPT)
    planned(router, LONG)
    (_, submit), *_ = router.submits
    router.ended(D, submit, EndReason.STEP_FAILED)
    assert sorted(to for to, _ in router.submits) == ["d2", "p"]


def test_prefill_workers_with_tiers_are_chosen_by_what_loading_saves() -> None:
    near, far = (worker(name, "prefill", tiers=TIERS) for name in ("a", "b"))
    router = Router(near, far, worker("d", "decode"), pull_tokens_min=100)
    router.tier_holds(far, PROMPT)
    assert planned(router, LONG)[:2] == ("b", "d")
    router.core.from_worker(0, far.incarnation, measured(3000, 1000))
    router.holds(near, PROMPT[:16])
    new = request("r2", num_tokens=41)
    assert planned(router, new)[:2] == ("a", "d"), "40 tokens less 36 for loading, or 16"


def test_what_tiers_forget_is_computed() -> None:
    router = pair()
    router.tier_holds(D, PROMPT)
    start = router.core.kv_sequence(D.incarnation)
    assert router.core.kv_events(D.incarnation, "e1", start, None, [TierCleared(0)])
    assert planned(router, LONG)[:2] == ("p", "d")


def test_the_local_policy_goes_by_tiers_as_well() -> None:
    router = Router(worker("a"), worker("b", tiers=TIERS), policy="local")
    router.tier_holds(worker("b"), PROMPT)
    assert planned(router, LONG)[:2] == ("b", "b")


MANY = [worker(f"t{number:02}", "prefill", tiers=TIERS) for number in range(40)]


def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Who was asked what loading would read, as it comes."""
    bits: list[int] = []
    loads = PrefixHits._loads

    def counted(hits: PrefixHits, bit: int, usable: int, reach: int) -> tuple[tuple[int, int], ...]:
        bits.append(bit)
        return loads(hits, bit, usable, reach)

    monkeypatch.setattr(PrefixHits, "_loads", counted)
    return bits


@pytest.mark.parametrize("policy", POLICIES)
def test_one_order_asks_a_few_of_many_who_load(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    bits = asked(monkeypatch)
    router = Router(*MANY, worker("d", "decode"), policy=policy)
    for info in MANY:
        router.tier_holds(info, PROMPT)
    planned(router, LONG)
    assert 0 < len(set(bits)) <= LOADERS_MAX
    assert len(bits) == len(set(bits)), "a worker was asked twice for one plan"


def test_control_without_a_bound_all_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "LOADERS_MAX", 1000)
    with pytest.raises(AssertionError):
        test_one_order_asks_a_few_of_many_who_load(monkeypatch, "prefix_then_load")


def test_of_many_who_load_those_are_asked_that_have_most_already() -> None:
    router = Router(*MANY, worker("d", "decode"))
    slow = measured(1000, 1000)
    for number, info in enumerate(MANY):
        router.tier_holds(info, PROMPT)
        router.core.from_worker(0, info.incarnation, slow)
        if number >= 30:
            router.holds(info, PROMPT[: 4 * (number - 30)])
    assert planned(router, LONG)[0] == "t39", "36 tokens in its pool and 4 more in its tiers"


def test_of_many_equal_ones_those_are_asked_that_have_least_to_do() -> None:
    router = Router(*MANY, worker("d", "decode"))
    for info in MANY:
        router.tier_holds(info, PROMPT)
        idle = info in MANY[20:25]
        stats = replace(STATS, num_waiting=0 if idle else 2, num_running=0 if idle else 3)
        router.core.from_worker(0, info.incarnation, stats)
    assert planned(router, LONG)[0] == "t20"


def test_who_reaches_less_by_tiers_than_pools_have_comes_after_them() -> None:
    """The prefix in a pool costs nothing; who has it cannot hand over, so the next one does."""
    other = replace(CONTRACT, page_format="other")
    best = worker("a", "prefill", contract=other)
    router = Router(
        best, worker("b", "prefill", tiers=TIERS), worker("c", "prefill"), worker("d", "decode"),
        accept_unlike_workers=True, pull_tokens_min=100, decode_prefill_tokens_max=0,
    )  # fmt: skip
    router.holds(best, PROMPT[:40])
    router.tier_holds(worker("b"), PROMPT[:36])
    router.holds(worker("c"), PROMPT[:16])
    assert planned(router, LONG)[:2] == ("b", "d")
