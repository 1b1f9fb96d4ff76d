"""vLLM workers: hand-over over NIXL, moves in mid-decode, a runner that fails, unlike partners."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.process.harness import Cluster, running, wait_until
from tests.process.served_model import (
    PRINTABLE_IDS,
    ServedModel,
    assert_exact,
    handed_over,
    is_reported,
)
from tests.vllm.engines import BLOCK_TOKENS
from tests.vllm.families import make_family

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

STATES = ("nemotron_h", "granite_hybrid")
FAMILIES = ("gemma3", "mistral", "qwen3", "gpt_oss", "llama4", *STATES)
WINDOW = 40
LENGTHS = (1, 31, 32, 33, WINDOW, WINDOW + 1, 2 * BLOCK_TOKENS, 7 * WINDOW + 3)
"""Around blocks of 32 and a window of 40; more than one chunk of 96."""
OPTIONS: dict[str, Any] = {
    "engine": "vllm",
    "block_tokens": BLOCK_TOKENS,
    "max_model_tokens": 1024,
    "max_step_tokens": 96,
    "max_sequences": 32,
}
HALF_TOLERANCE = 0.25
"""Of logprobs in bfloat16."""
ROUTER_OPTIONS = {"worker_silent_ms": 60_000, "pull_tokens_min": 64}
NUM_AT_ONCE = 12


def started(
    folder: Path, family: str, engines: dict[str, str], **options: Any
) -> Iterator[ServedModel]:
    """A prefill worker ``p0`` and a decode worker ``d0`` with the engines that are named."""
    torch.set_num_threads(1)
    directory = make_family(folder / family, family, WINDOW)
    cluster = Cluster(directory, folder, OPTIONS | options, ROUTER_OPTIONS)
    with running(cluster):
        for name, role in (("p0", "prefill"), ("d0", "decode")):
            cluster.spawn(name, role, engine=engines[name])
        cluster.wait_ready("p0", "d0")
        yield ServedModel(cluster)


@pytest.fixture(scope="module")
def of_family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedModel]:
    folder = tmp_path_factory.mktemp("vllm")
    yield from started(folder, request.param, {"p0": "vllm", "d0": "vllm"})


@pytest.fixture
def served(of_family: ServedModel) -> Iterator[ServedModel]:
    of_family.restore()
    yield of_family
    of_family.settle()


def held_by_runner(served: ServedModel, name: str) -> int:
    """Sequences in vLLM's runner, after a step that told it of all ends before."""
    count = served.cluster.counts(name)["sequences"]
    assert isinstance(count, int)
    return count


def generation_of(served: ServedModel, request_id: str) -> dict[str, Any]:
    """The only one of a request that was handed over, with the prefill's report."""
    wait_until(lambda: is_reported(served.cluster.record(request_id)), "the prefill's report")
    return handed_over(served.cluster.record(request_id))


@pytest.mark.parametrize("of_family", FAMILIES, indirect=True)
class TestHandedOver:
    def test_around_blocks_and_windows(self, served: ServedModel) -> None:
        for length in LENGTHS:
            generation = served.serve(served.prompt(length))
            assert generation["hit_tokens"] == 0
            assert generation["computed_tokens"] == length
        # Whoever was served before has left the runner: the last one leaves with the next step.
        assert [held_by_runner(served, name) for name in ("p0", "d0")] == [1, 1]

    def test_with_prefix_hits_on_both_sides(self, served: ServedModel) -> None:
        first = served.prompt(150)
        served.serve(first)
        # States are kept at the same block ends; of this one blocks have 96 tokens.
        hit_tokens = 96 if served.cluster.model_dir.name == "granite_hybrid" else 128
        assert served.serve(first)["hit_tokens"] == hit_tokens
        shared = served.serve(served.prompt(171, start=first.prompt[:130]))
        assert shared["hit_tokens"] == hit_tokens

    def test_many_at_once(self, served: ServedModel) -> None:
        common = served.prompt(70).prompt
        several = [
            served.prompt(5 + 9 * n, 8) if n % 3 else served.prompt(75 + n, 8, start=common)
            for n in range(NUM_AT_ONCE)
        ]
        with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
            list(threads.map(served.serve, several))

    def test_unwritten_kv_is_noticed(self, served: ServedModel) -> None:
        """Control: a block that the READ left out fails its step; another worker answers."""
        expected = served.prompt(150)
        groups = len(served.cluster.known()["d0"]["info"]["groups"])
        served.cluster.tell("d0", f"unwritten {groups - 1}")
        assert_exact(served.ask(expected, "spoiled"), expected)
        first, *_ = served.cluster.record("spoiled")["generations"]
        assert "NonFiniteError" in first["cause"]
        served.cluster.tell("d0", "intact")
        served.serve(served.prompt(150, salt="again"))

    def test_moved_in_mid_decode(self, served: ServedModel) -> None:
        """The last test of a family: d0 is dead after it."""
        cluster, expected = served.cluster, served.prompt(150, 30)
        told = cluster.tell("d0", "hold steps")
        cluster.tell("d0", "pass steps 4")
        answer = served.ask_later(expected, "moved")
        cluster.wait_told("d0", "held steps", told)
        wait_until(lambda: cluster.record("moved")["num_tokens"] == 5, "five tokens")
        cluster.workers["d0"].kill()
        assert_exact(answer.result(60), expected)
        first, second = cluster.record("moved")["generations"]
        assert first["cause"].startswith("worker_lost")
        assert (first["num_tokens"], second["num_tokens"]) == (5, 25)
        cluster.wait_quiescent()


@pytest.mark.parametrize("family", ["qwen3_next"])
def test_states_of_gated_delta_nets_are_handed_over(family: str, tmp_path: Path) -> None:
    """In bfloat16, as vLLM's CPU kernels are: of prompts whose reference tokens win by far.

    A state of each of three layers and one block of attention move, of 1,056 tokens each.
    """
    options = {"dtype": "bfloat16", "max_model_tokens": 2304, "num_blocks": 60}
    for served in started(tmp_path, family, {"p0": "vllm", "d0": "vllm"}, **options):
        drawn = (served.prompt(length, 5, salt="gdn") for length in range(20, 140, 3))
        clear = [expected for expected in drawn if expected.min_gap > 2 * HALF_TOLERANCE][:4]
        assert len(clear) > 2
        for number, expected in enumerate(clear):
            (choice,) = served.ask(expected, f"gdn-{number}").choices
            assert choice.logprobs is not None
            assert choice.logprobs.tokens == list(expected.texts)
            logprobs = pytest.approx(expected.logprobs, abs=HALF_TOLERANCE)
            assert choice.logprobs.token_logprobs == logprobs
            assert generation_of(served, f"gdn-{number}")["computed_tokens"] == len(expected.prompt)


def test_sampled_tokens_stay_when_a_request_moves(tmp_path: Path) -> None:
    """And a runner that raises takes its process along, with a reason."""
    for served in started(tmp_path, "qwen3", {"p0": "vllm", "d0": "vllm"}):
        cluster = served.cluster
        rng = random.Random("sampled")
        body: dict[str, Any] = {
            "model": "tiny",
            "prompt": rng.choices(PRINTABLE_IDS, k=100),
            "max_tokens": 24,
            "temperature": 1.0,
            "top_p": 0.95,
            "seed": 7,
        }
        unmoved = cluster.client.completions.create(**body).choices[0].text
        other = cluster.client.completions.create(**(body | {"seed": 8})).choices[0].text
        assert other != unmoved  # control
        told = cluster.tell("d0", "hold steps")
        cluster.tell("d0", "pass steps 4")
        stream = cluster.client.completions.create(**body, stream=True)
        chunks = iter(stream)
        text = next(chunks).choices[0].text
        cluster.wait_told("d0", "held steps", told)
        cluster.tell("d0", "break engine")
        cluster.tell("d0", "pass steps")
        text += "".join(chunk.choices[0].text for chunk in chunks)
        assert text == unmoved
        assert cluster.workers["d0"].popen.wait(60) == 1
        logged = cluster.workers["d0"].logged()
        assert "cannot go on: vLLM's runner failed: IndexError: broken by a test" in logged


@pytest.mark.parametrize("engines", [("native", "vllm"), ("vllm", "native")])
def test_unlike_pages_are_never_exchanged(tmp_path: Path, engines: tuple[str, str]) -> None:
    """Same checkpoint, same layout, another order inside a page: each answers alone."""
    for served in started(tmp_path, "gemma3", dict(zip(("p0", "d0"), engines, strict=True))):
        known = served.cluster.known()
        contracts = [known[name]["info"]["contract"] for name in ("p0", "d0")]
        unlike = {name for name in contracts[0] if contracts[0][name] != contracts[1][name]}
        assert unlike == {"page_format"}
        first = served.prompt(150)
        several = [
            first,
            *(served.prompt(151 + n, start=first.prompt[:130]) for n in range(7)),
            first,
        ]
        names = [f"mixed-{number}" for number in range(len(several))]
        with ThreadPoolExecutor(len(several)) as threads:
            for answer, expected in zip(
                threads.map(served.ask, several, names), several, strict=True
            ):
                assert_exact(answer, expected)
        parts = [served.cluster.record(name)["generations"] for name in names]
        assert {one["decode"]["worker_id"] for (one,) in parts} == {"p0", "d0"}
        for (generation,) in parts:
            assert generation["local"], generation["reason"]
            assert generation["transfer"] is None
            assert generation["pull"] is None
