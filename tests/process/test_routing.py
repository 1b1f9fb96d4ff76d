"""Requests go to the worker that holds their prefix; look-ups and generation over plain gRPC."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc
import pytest

from disagg.wire.v1 import router_pb2, router_pb2_grpc, sampling_pb2
from tests.checkpoints import make_checkpoint
from tests.process.harness import MODEL, Cluster, running, wait_until
from tests.process.served_model import (
    WINDOW,
    Expected,
    ServedModel,
    assert_exact,
    handed_over,
)

pytestmark = pytest.mark.timeout(600)

WORKERS = ("p0", "p1", "d0")
SMALL_POOL = 160
PUSHES_MAX = 40
FULL = 5
"""The group of the full-attention layer; those before it have windows."""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    folder = tmp_path_factory.mktemp("routing")
    model_dir = make_checkpoint(folder / "gemma3", "gemma3", window=WINDOW)
    # With segmented_lru the blocks that were found again would stay longest, windows or not.
    options = {"max_step_tokens": 96, "eviction": "lru"}
    router_options = {"worker_silent_ms": 60_000}
    with running(Cluster(model_dir, folder, options, router_options)) as cluster:
        for name in ("p0", "p1"):
            cluster.spawn(name, "prefill", num_blocks=SMALL_POOL)
        cluster.spawn("d0", "decode")
        cluster.wait_ready(*WORKERS)
        yield ServedModel(cluster)


@pytest.fixture
def two_prefills(started: ServedModel) -> Iterator[ServedModel]:
    """Prefill workers p0 and p1 with small pools; nothing cached, known to the router."""
    started.restore()
    yield started
    started.settle()


@pytest.fixture
def stub(two_prefills: ServedModel) -> Iterator[router_pb2_grpc.RouterStub]:
    with two_prefills.cluster.channel(two_prefills.cluster.grpc_address) as channel:
        yield router_pb2_grpc.RouterStub(channel)


Held = dict[str, tuple[int, tuple[int, ...]]]


def match(stub: router_pb2_grpc.RouterStub, prompt: tuple[int, ...]) -> Held:
    """Per worker the usable prefix, and what each group holds on its own."""
    answer = stub.Match(router_pb2.MatchRequest(model=MODEL, token_ids=prompt), timeout=30)
    assert answer.num_tokens == len(prompt)
    usable = [worker.usable_tokens for worker in answer.workers]
    assert usable == sorted(usable, reverse=True)
    return {
        worker.worker.worker_id: (worker.usable_tokens, tuple(worker.group_tokens))
        for worker in answer.workers
    }


def usable_at_p0(stub: router_pb2_grpc.RouterStub, prompt: tuple[int, ...]) -> int:
    return match(stub, prompt)["p0"][0]


def prefilled_by(served: ServedModel, expected: Expected) -> str:
    name: str = served.serve(expected)["prefill"]["worker_id"]
    return name


def test_a_request_goes_to_the_worker_that_holds_its_prefix(
    two_prefills: ServedModel, stub: router_pb2_grpc.RouterStub
) -> None:
    """Two prompts lie on different workers; what continues them follows, whatever the order."""
    cluster = two_prefills.cluster
    one, two = two_prefills.prompt(150, salt="one"), two_prefills.prompt(150, salt="two")
    assert match(stub, one.prompt) == {name: (0, (0,) * 6) for name in WORKERS}
    two_prefills.wait_idle()
    told = cluster.tell("p0", "hold steps")
    first = two_prefills.ask_later(one, "one")
    cluster.wait_told("p0", "held steps", told)
    second = two_prefills.ask_later(two, "two")  # p0 is busy
    assert_exact(second.result(60), two)
    cluster.tell("p0", "pass steps")
    assert_exact(first.result(60), one)
    assert handed_over(cluster.record("one"))["prefill"]["worker_id"] == "p0"
    assert handed_over(cluster.record("two"))["prefill"]["worker_id"] == "p1"

    def known() -> bool:
        of_one, of_two = match(stub, one.prompt), match(stub, two.prompt)
        return {of_one["p0"][0], of_two["p1"][0], of_one["d0"][0], of_two["d0"][0]} == {144}

    wait_until(known, "the router to hear of both")
    held = match(stub, one.prompt)
    assert held["p0"] == (144, (144,) * 6)
    assert held["p1"] == (0, (0,) * 6)
    # The decode worker pulled all of full attention and three blocks of each window.
    assert held["d0"] == (144, (144,) * 6)
    for n, (holder, start) in enumerate((("p1", two), ("p0", one), ("p1", two))):
        two_prefills.wait_idle()
        generation = two_prefills.serve(
            two_prefills.prompt(170, start=start.prompt, salt=f"after {n}")
        )
        assert generation["prefill"]["worker_id"] == holder
        assert generation["expected_hit_tokens"] == generation["hit_tokens"] == 144


def test_a_prefix_whose_window_blocks_were_evicted_is_no_hit(
    two_prefills: ServedModel, stub: router_pb2_grpc.RouterStub
) -> None:
    """Other requests push the prefix's window blocks out while full attention still has it.

    A longer request keeps the full-attention blocks in use to its end and leaves the window
    blocks behind on its way, so these are the older ones among what is cached.
    """
    kept = two_prefills.prompt(150, salt="kept")
    two_prefills.wait_idle()
    assert prefilled_by(two_prefills, kept) == "p0"
    wait_until(lambda: usable_at_p0(stub, kept.prompt) == 144, "the router to hear of it")
    longer = two_prefills.prompt(260, 2, start=kept.prompt[:144])
    two_prefills.wait_idle()
    assert prefilled_by(two_prefills, longer) == "p0"

    def windows_are_gone() -> bool:
        usable, groups = match(stub, kept.prompt)["p0"]
        return usable == 0 and groups[FULL] == 144

    for n in range(PUSHES_MAX):
        other = two_prefills.prompt(17, 2, salt=f"push {n}")
        two_prefills.wait_idle()
        if prefilled_by(two_prefills, other) != "p0":  # stats of its last request came late
            continue
        # Events keep their order: with this one's blocks all that it pushed out is known.
        wait_until(partial(usable_at_p0, stub, other.prompt), "the router to hear of it")
        if windows_are_gone():
            break
    usable, groups = match(stub, kept.prompt)["p0"]
    assert (usable, groups[FULL]) == (0, 144), groups
    two_prefills.wait_idle()
    again = two_prefills.serve(kept)
    assert again["prefill"]["worker_id"] == "p0"  # which still has the full-attention blocks
    assert again["expected_hit_tokens"] == again["hit_tokens"] == 0


def test_generate_over_grpc_streams_the_same_tokens(
    two_prefills: ServedModel, stub: router_pb2_grpc.RouterStub
) -> None:
    expected = two_prefills.prompt(150, 20, salt="grpc")
    request = router_pb2.GenerateRequest(
        request_id="grpc",
        model=MODEL,
        token_ids=expected.prompt,
        sampling=sampling_pb2.SamplingParams(max_tokens=20, num_logprobs=1),
    )
    responses = list(stub.Generate(request, timeout=60))
    assert len(responses) > 1
    assert tuple(t for r in responses for t in r.token_ids) == expected.token_ids
    assert [p for r in responses for p in r.logprobs] == pytest.approx(expected.logprobs, abs=1e-4)
    assert "".join(r.text for r in responses) == "".join(expected.texts)
    assert [r.finish_reason for r in responses] == [""] * (len(responses) - 1) + ["length"]
    assert {r.num_prompt_tokens for r in responses} == {150}
    handed_over(two_prefills.cluster.record("grpc"))


def test_a_grpc_client_that_leaves_is_noticed(
    two_prefills: ServedModel, stub: router_pb2_grpc.RouterStub
) -> None:
    cluster, expected = two_prefills.cluster, two_prefills.prompt(150, 30, salt="grpc")
    told = cluster.tell("d0", "hold steps")
    request = router_pb2.GenerateRequest(
        request_id="leaves",
        model=MODEL,
        token_ids=expected.prompt,
        sampling=sampling_pb2.SamplingParams(max_tokens=30),
    )
    call = stub.Generate(request, timeout=60)
    assert next(iter(call)).text == expected.texts[0]
    cluster.wait_told("d0", "held steps", told)
    call.cancel()
    wait_until(lambda: cluster.record("leaves")["outcome"] == "cancelled", "the router to notice")


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"model": "another"}, grpc.StatusCode.NOT_FOUND, "model"),
        ({"token_ids": []}, grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        ({"token_ids": [320]}, grpc.StatusCode.INVALID_ARGUMENT, "token_ids"),
        ({"token_ids": [20] * 5000}, grpc.StatusCode.INVALID_ARGUMENT, "token_ids"),
        ({"prompt": "both"}, grpc.StatusCode.INVALID_ARGUMENT, "token_ids"),
    ],
)
def test_bad_requests_over_grpc_are_refused_by_name(
    stub: router_pb2_grpc.RouterStub, change: dict[str, Any], code: grpc.StatusCode, field: str
) -> None:
    fields: dict[str, Any] = {"model": MODEL, "token_ids": [20]} | change
    for call in (
        lambda: stub.Match(router_pb2.MatchRequest(**fields), timeout=30),
        lambda: list(stub.Generate(router_pb2.GenerateRequest(**fields), timeout=30)),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            call()
        assert refused.value.code() == code
        trailing: Any = refused.value.trailing_metadata()
        assert dict(trailing)["disagg-field"] == field
