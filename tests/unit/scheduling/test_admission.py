"""What a worker can end, and that nothing else is started: neither here nor by the router."""

from dataclasses import replace

import pytest

from disagg.errors import ConfigError, ContextLengthError
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.sequence import KVSequence
from disagg.kv.shapes.layout import plan_layout
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.registration import WorkerInfo
from disagg.messages.sampling import SamplingParams
from disagg.messages.submit import PeerAddress, Role, Submit
from disagg.scheduling.admission import SHORTEST_TOKENS, rejection_of, served_tokens_max
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.limits import WorkerLimits
from tests.unit.routing.builders import Router, request, worker

STEP_TOKENS = 8
LIMITS = WorkerLimits(
    max_model_tokens=200,
    max_step_tokens=STEP_TOKENS,
    max_sequences=2,
    max_waiting=2,
    handover_share_max=1.0,
    reserve_timeout_ms=100,
    reserve_passes_max=3,
    reservation_ttl_ms=5_000,
    lease_ttl_ms=1_000,
    committed_max=2,
    commit_repeat_ms=50,
    read_stuck_ms=1_000,
    blocks_per_read_max=4,
    quarantine_share_max=1.0,
)
FULL = FullAttentionSpec(4, 1, 8, 4)
WINDOW = SlidingWindowSpec(4, 1, 8, 4, 9)  # at most 17 tokens of it at once: 5 blocks


def pool(num_blocks: int, *specs: Spec) -> KVCacheCoordinator:
    """A coordinator with so many usable blocks."""
    kv = KVCacheCoordinator(
        plan_layout(list(specs or (FULL,))),
        num_blocks + 1,
        max_model_tokens=LIMITS.max_model_tokens,
        max_step_tokens=STEP_TOKENS,
    )
    assert kv.num_usable_blocks == num_blocks
    return kv


def ends(kv: KVCacheCoordinator, num_prompt: int, num_tokens: int) -> bool:
    """Whether one sequence gets the slots of all its tokens, chunk by chunk, then one by one."""
    sequence = KVSequence("r", list(range(num_tokens)))
    computed = 0
    while computed < num_tokens:
        left = num_prompt - computed
        num_new = min(left, STEP_TOKENS) if left > 0 else 1
        if not kv.allocate(sequence, num_new_tokens=num_new):
            return False
        computed += num_new
    return True


@pytest.mark.parametrize(
    ("specs", "num_blocks", "expected"),
    [
        ((FULL,), 6, 24),
        ((FULL,), 50, 200),
        ((FULL,), 51, 200),  # the model's own limit
        ((FULL, WINDOW), 8, 16),  # shorter than the window's peak: both groups grow
        ((FULL, WINDOW), 11, 24),  # beyond it only the full group does
        ((FULL, WINDOW), 30, 100),
        ((WINDOW,), 4, 16),
        ((WINDOW,), 5, 200),  # a window at its peak: however long it grows
    ],
)
def test_the_longest_sequence_that_ends_here(
    specs: tuple[Spec, ...], num_blocks: int, expected: int
) -> None:
    assert served_tokens_max(LIMITS, pool(num_blocks, *specs)) == expected


@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW), (WINDOW,)])
@pytest.mark.parametrize("num_blocks", range(2, 24, 3))
def test_what_is_registered_is_served(specs: tuple[Spec, ...], num_blocks: int) -> None:
    longest = served_tokens_max(LIMITS, pool(num_blocks, *specs))
    for num_prompt in {1, longest // 2, longest}:
        assert ends(pool(num_blocks, *specs), num_prompt, longest)
    if specs == (FULL,) and longest < LIMITS.max_model_tokens:
        assert not ends(pool(num_blocks, *specs), 1, longest + 1)


@pytest.mark.parametrize(("specs", "least"), [((FULL,), 1), ((FULL, WINDOW), 2)])
def test_a_pool_without_room_for_any_request_is_refused(
    specs: tuple[Spec, ...], least: int
) -> None:
    assert served_tokens_max(LIMITS, pool(least, *specs)) >= SHORTEST_TOKENS
    if least > 1:
        said = f"worker.num_blocks: {least} are too few .* take {least}, .* at least {least + 1}$"
        with pytest.raises(ConfigError, match=said):
            served_tokens_max(LIMITS, pool(least - 1, *specs))


@pytest.mark.parametrize(
    ("role", "max_tokens", "said"),
    [
        (Role.LOCAL, 16, ""),
        (Role.LOCAL, 17, "25 tokens need 7 blocks, the pool has 6"),
        (Role.DECODE, 16, ""),
        (Role.DECODE, 17, "25 tokens need 7 blocks, the pool has 6"),
        (Role.PREFILL, 50, ""),  # the decode worker must hold the rest
        (Role.LOCAL, 1000, "200 tokens need 50 blocks, the pool has 6"),  # it ends at the model's
    ],
)
def test_what_would_outgrow_the_pool_is_not_started(role: Role, max_tokens: int, said: str) -> None:
    peer = None if role is Role.LOCAL else PeerAddress(Incarnation("x", "e"), "x:1")
    sampling = SamplingParams(max_tokens)
    submit = Submit(RequestKey("r", 1), role, tuple(range(8)), (), b"", sampling, peer)
    assert rejection_of(submit, LIMITS, pool(6)) == said


UNKNOWN = "what is prompt and what is answer must be known"


@pytest.mark.parametrize(
    ("num_prompt", "said"),
    [
        (0, f"{UNKNOWN}: sampling.num_prompt_tokens=0 of 8 tokens"),
        (9, f"{UNKNOWN}: sampling.num_prompt_tokens=9 of 8 tokens"),
        (3, ""),  # five of them were generated, elsewhere
        (8, ""),
    ],
)
@pytest.mark.parametrize(
    "looks_back",
    [
        SamplingParams(4, presence_penalty=0.5),
        SamplingParams(4, frequency_penalty=0.5),
        SamplingParams(4, repetition_penalty=2.0),
        SamplingParams(4, grammar="{}"),
        SamplingParams(4, min_tokens=1),
        SamplingParams(4, num_prompt_logprobs=0),
    ],
)
def test_who_looks_back_must_know_what_the_prompt_is(
    looks_back: SamplingParams, num_prompt: int, said: str
) -> None:
    """A client that submits to a worker without the router may have left it out."""
    for one, expected in ((looks_back, said), (SamplingParams(4), "")):  # and a control
        sampling = replace(one, num_prompt_tokens=num_prompt)
        submit = Submit(RequestKey("r", 1), Role.LOCAL, tuple(range(8)), (), b"", sampling)
        assert rejection_of(submit, LIMITS, pool(20)) == expected


def registered(name: str, num_blocks: int) -> WorkerInfo:
    kv = pool(num_blocks)
    longest = served_tokens_max(LIMITS, kv)
    return worker(name, max_model_tokens=longest, num_blocks=num_blocks)


def test_the_router_refuses_what_no_pool_can_end_before_it_starts() -> None:
    router = Router(registered("small", 6))
    with pytest.raises(
        ContextLengthError, match=r"need 58 tokens, the largest worker that is ready serves 24"
    ):
        router.generate(request(num_tokens=8, max_tokens=50))
    assert router.core.num_live == 0
    assert router.core.max_model_tokens == 24
    router.generate(request(num_tokens=8, max_tokens=16))
    ((_, submit),) = router.submits
    assert rejection_of(submit, LIMITS, pool(6)) == ""


def test_of_two_pools_the_larger_one_decodes_what_outgrows_the_other() -> None:
    small, large = registered("a", 6), registered("b", 15)
    router = Router(small, replace(large, role="decode"))
    assert router.core.max_model_tokens == 60
    router.generate(request(num_tokens=8, max_tokens=50))
    assert [(who, submit.role) for who, submit in router.submits] == [
        ("b", Role.DECODE),
        ("a", Role.PREFILL),
    ]
    for who, submit in router.submits:
        assert rejection_of(submit, LIMITS, pool(6 if who == "a" else 15)) == ""
    router = Router(replace(small, role="prefill"), large)
    router.holds(small, request(num_tokens=30).token_ids)
    router.generate(request(num_tokens=30, max_tokens=20))  # the small one lacks even the prompt
    assert [(who, submit.role) for who, submit in router.submits] == [("b", Role.LOCAL)]


def test_as_many_start_in_one_step_as_may_run() -> None:
    layout = plan_layout([FULL])
    limits = replace(LIMITS, max_sequences=3, max_waiting=4)
    core = WorkerCore(
        Incarnation("w", "1"), layout, pool(50), BlockHasher(b"key", 4), limits, lambda _: 1
    )
    for number in range(4):
        submit = Submit(
            RequestKey(f"r{number}", 1), Role.LOCAL, (number, 1), (), b"", SamplingParams(2)
        )
        core.on_router_message(0, submit)
    step, _ = core.next_step(0)
    assert step is not None
    assert len(step.slices) == limits.max_sequences
