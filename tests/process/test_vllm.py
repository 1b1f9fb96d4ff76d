"""vLLM workers: hand-over over NIXL, moves in mid-decode, a runner that fails, unlike partners."""

import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.process.harness import Cluster, running, wait_until
from tests.process.served_model import (
    GAP_MIN,
    LOGPROB_TOLERANCE,
    PRINTABLE_IDS,
    ServedModel,
    assert_exact,
)
from tests.vllm.engines import BLOCK_TOKENS
from tests.vllm.families import make_family

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

WINDOW = 40
LENGTHS = (1, 31, 32, 33, WINDOW, WINDOW + 1, 2 * BLOCK_TOKENS, 7 * WINDOW + 3)
"""Around blocks of 32 and a window of 40; more than one chunk of 96."""
OPTIONS: dict[str, Any] = {
    "engine": "vllm",
    "max_model_tokens": 1024,
    "max_step_tokens": 96,
    "max_sequences": 32,
    "reserve_timeout_ms": 30_000,  # a partner that is slow is waited for
    "reserve_passes_max": 1_000,
}
ROUTER_OPTIONS = {"worker_silent_ms": 60_000, "pull_tokens_min": 64}


@dataclass(frozen=True)
class Case:
    """How a family is tried.

    Attributes:
        options: of its workers, beside those of all.
        overrides: of the checkpoint's configuration.
        tolerance: of logprobs.
        gap_min: by which every token wins.
        lengths: of prompts.
        num_tokens: of an answer.
        num_at_once: requests.
        hit: length of a prompt, and how many of its tokens are found again.
        moved_at: tokens that a moved request has, and those it gets afterwards.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = LOGPROB_TOLERANCE
    gap_min: float = GAP_MIN
    lengths: Sequence[int] = LENGTHS
    num_tokens: int = 12
    num_at_once: int = 12
    hit: tuple[int, int] = (150, 128)
    moved_at: tuple[int, int] = (5, 25)


FAMILIES = {
    "falcon_h1": Case(),
    "gemma2": Case(),
    "gemma3": Case(),
    "gpt_oss": Case(),
    "granite_hybrid": Case(hit=(150, 96)),  # its blocks have 96 tokens
    "llama": Case(),
    "llama4": Case(),
    "mistral": Case(),
    "nemotron_h": Case(),
    "qwen3": Case(),
    # In bfloat16, as vLLM's CPU kernels for gated delta nets are: few tokens, which win by far. Its
    # tokens go to all experts: with a choice a rounding, which depends on who else is in the batch,
    # would decide whom they go to. A block has 1,056.
    "qwen3_next": Case(
        {"dtype": "bfloat16", "max_model_tokens": 2304, "num_blocks": 60},
        {"num_experts_per_tok": 4},
        tolerance=0.25,
        gap_min=0.5,
        lengths=(20, 100, 7 * WINDOW + 3),
        num_tokens=4,
        num_at_once=4,
        hit=(1_100, 1_056),
        moved_at=(2, 3),
    ),
}


def started(
    folder: Path, family: str, engines: dict[str, str], accept_unlike: bool = False, **changed: Any
) -> Iterator[ServedModel]:
    """A prefill worker ``p0`` and a decode worker ``d0`` with the engines that are named."""
    torch.set_num_threads(1)
    case = FAMILIES[family]
    directory = make_family(folder / family, family, WINDOW, **case.overrides)
    options = OPTIONS | dict(case.options) | changed
    router_options = ROUTER_OPTIONS | {"accept_unlike_workers": accept_unlike}
    cluster = Cluster(directory, folder, options, router_options)
    with running(cluster):
        for name, role in (("p0", "prefill"), ("d0", "decode")):
            cluster.spawn(name, role, engine=engines[name])
        cluster.wait_ready("p0", "d0")
        yield ServedModel(cluster, tolerance=case.tolerance, gap_min=case.gap_min)


@pytest.fixture(scope="module")
def of_family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedModel]:
    folder = tmp_path_factory.mktemp("vllm")
    yield from started(folder, request.param, {"p0": "vllm", "d0": "vllm"})


@pytest.fixture
def case(of_family: ServedModel) -> Case:
    return FAMILIES[of_family.cluster.model_dir.name]


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


@pytest.mark.parametrize("of_family", FAMILIES, indirect=True)
class TestHandedOver:
    def test_around_blocks_and_windows(self, served: ServedModel, case: Case) -> None:
        for length in case.lengths:
            generation = served.serve(served.prompt(length, case.num_tokens))
            assert generation["hit_tokens"] == 0
            assert generation["computed_tokens"] == length
        # Whoever was served before has left the runner: the last one leaves with the next step.
        assert [held_by_runner(served, name) for name in ("p0", "d0")] == [1, 1]

    def test_with_prefix_hits_on_both_sides(self, served: ServedModel, case: Case) -> None:
        length, hit_tokens = case.hit
        first = served.prompt(length, case.num_tokens)
        served.serve(first)
        assert served.serve(first)["hit_tokens"] == hit_tokens
        start = first.prompt[: hit_tokens + 2]
        shared = served.serve(served.prompt(length + 21, case.num_tokens, start=start))
        assert shared["hit_tokens"] == hit_tokens

    def test_many_at_once(self, served: ServedModel, case: Case) -> None:
        num_tokens = min(case.num_tokens, 8)
        common = served.prompt(70, num_tokens).prompt
        several = [
            served.prompt(5 + 9 * n, num_tokens)
            if n % 3
            else served.prompt(75 + n, num_tokens, start=common)
            for n in range(case.num_at_once)
        ]
        with ThreadPoolExecutor(case.num_at_once) as threads:
            list(threads.map(served.serve, several))

    def test_unwritten_kv_is_noticed(self, served: ServedModel, case: Case) -> None:
        """Control: a block that the READ left out fails its step; another worker answers."""
        expected = served.prompt(150, case.num_tokens)
        groups = len(served.cluster.known()["d0"]["info"]["groups"])
        served.cluster.tell("d0", f"unwritten {groups - 1}")
        assert_exact(served.ask(expected, "spoiled"), expected)
        first, *_ = served.cluster.record("spoiled")["generations"]
        assert "NonFiniteError" in first["cause"]
        served.cluster.tell("d0", "intact")
        served.serve(served.prompt(150, case.num_tokens, salt="again"))

    def test_moved_in_mid_decode(self, served: ServedModel, case: Case) -> None:
        """The last test of a family: d0 is dead after it."""
        before, after = case.moved_at
        cluster, expected = served.cluster, served.prompt(150, before + after)
        told = cluster.tell("d0", "hold steps")
        cluster.tell("d0", f"pass steps {before - 1}")
        answer = served.ask_later(expected, "moved")
        cluster.wait_told("d0", "held steps", told)
        wait_until(lambda: cluster.record("moved")["num_tokens"] == before, "the first tokens")
        cluster.workers["d0"].kill()
        assert_exact(answer.result(60), expected)
        first, second = cluster.record("moved")["generations"]
        assert first["cause"].startswith("worker_lost")
        assert (first["num_tokens"], second["num_tokens"]) == case.moved_at
        cluster.wait_quiescent()


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
    kinds = dict(zip(("p0", "d0"), engines, strict=True))
    for served in started(tmp_path, "gemma3", kinds, True, block_tokens=BLOCK_TOKENS):
        known = served.cluster.known()
        contracts = [known[name]["info"]["contract"] for name in ("p0", "d0")]
        unlike = {name for name in contracts[0] if contracts[0][name] != contracts[1][name]}
        assert unlike == {"page_format", "forms"}
        first = served.prompt(150)
        several = [
            first,
            *(served.prompt(151 + n, start=first.prompt[:130]) for n in range(7)),
            first,
        ]
        names = [f"mixed-{number}" for number in range(len(several))]
        # Nothing ends before both have something to do, or the first to have the prefix gets all.
        told = {name: served.cluster.tell(name, "hold steps") for name in kinds}
        answers = list(map(served.ask_later, several, names))
        for name in kinds:
            served.cluster.wait_told(name, "held steps", told[name])
        for name in kinds:
            served.cluster.tell(name, "pass steps")
        for answer, expected in zip(answers, several, strict=True):
            assert_exact(answer.result(), expected)
        parts = [served.cluster.record(name)["generations"] for name in names]
        assert {one["decode"]["worker_id"] for (one,) in parts} == {"p0", "d0"}
        for (generation,) in parts:
            assert generation["local"], generation["reason"]
            assert generation["transfer"] is None
            assert generation["pull"] is None
