"""Prefill and decode in blocks of other sizes, over NIXL: exact, hit or none, pipelined or not."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.process.harness import START_S, Cluster, Process, running, wait_until
from tests.process.served_model import WINDOW, ServedModel, assert_exact, pulled_bytes

pytestmark = pytest.mark.timeout(600)

CHUNKED, WHOLE = 96, 2048
"""Tokens of a step: prompts are pulled while they are computed, or at once."""
CASES = (
    ("gemma3", (16, 32), CHUNKED),  # windows
    ("nemotron_h", (32, 16), CHUNKED),  # states
    ("deepseek_v3", (8, 32), WHOLE),  # latents
    ("llama4", (32, 16), WHOLE),  # chunks
    ("qwen3", (16, 32), WHOLE),
    ("gemma3", (32, 8), WHOLE),
    ("nemotron_h", (8, 32), WHOLE),
)
"""Every kind, every ratio both ways, pulled in pieces and at once; what depends on two of them at a
time is tested on planned parts (`tests/unit/transfer/test_read_plan.py`). Sizes: tokens of a block
at the prefill worker, and at the decode worker."""
NUM_QUICK = 2
LENGTHS = (1, 15, 16, 17, 31, 32, 33, WINDOW + 17, 95, 97, 7 * WINDOW + 3)
NUM_AT_ONCE = 16
OPTIONS = {
    "hash_block_tokens": 8,
    "max_model_tokens": 1024,
    "max_sequences": 32,
    "read_handle_bytes_max": 1 << 16,
}


def start(folder: Path, family: str, max_step_tokens: int) -> Cluster:
    torch.set_num_threads(1)
    directory = make_checkpoint(folder / family, family, window=WINDOW)
    options = OPTIONS | {"max_step_tokens": max_step_tokens}
    return Cluster(directory, folder, options, {"worker_silent_ms": 60_000, "pull_tokens_min": 32})


def spawn(cluster: Cluster, sizes: tuple[int, int]) -> None:
    """Blocks of other sizes, and other pools: each has as many tokens as it likes."""
    for name, role, tokens in zip(("p0", "d0"), ("prefill", "decode"), sizes, strict=True):
        cluster.spawn(name, role, block_tokens=tokens, num_blocks=700 + 10 * tokens)


@pytest.fixture(
    scope="module",
    params=[
        *CASES[:NUM_QUICK],
        *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[NUM_QUICK:]),
    ],
    ids=str,
)
def case(request: pytest.FixtureRequest) -> tuple[str, tuple[int, int], int]:
    chosen: tuple[str, tuple[int, int], int] = request.param
    return chosen


@pytest.fixture
def sizes(case: tuple[str, tuple[int, int], int]) -> tuple[int, int]:
    return case[1]


@pytest.fixture(scope="module")
def of_family(
    case: tuple[str, tuple[int, int], int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedModel]:
    family, sizes, max_step_tokens = case
    cluster = start(tmp_path_factory.mktemp("unequal"), family, max_step_tokens)
    with running(cluster):
        spawn(cluster, sizes)
        cluster.wait_ready("p0", "d0")
        yield ServedModel(cluster)


@pytest.fixture
def served(of_family: ServedModel) -> Iterator[ServedModel]:
    of_family.restore()
    yield of_family
    of_family.settle()


def test_around_blocks_of_both_sizes(served: ServedModel) -> None:
    for length in LENGTHS:
        generation = served.serve(served.prompt(length))
        assert generation["hit_tokens"] == 0
        assert pulled_bytes(generation) > 0


def test_prefixes_that_either_side_has(served: ServedModel, sizes: tuple[int, int]) -> None:
    """A repeated prompt, one that leaves it in the middle of a block, and one that goes on."""
    first = served.prompt(150)
    served.serve(first)
    again = served.serve(first)
    assert again["hit_tokens"] == 149 // sizes[0] * sizes[0]
    served.serve(served.prompt(171, start=first.prompt[:130]))
    served.serve(served.prompt(171, start=first.prompt[:130], salt="second"))
    grown = served.serve(served.prompt(190, start=first.whole))
    assert grown["hit_tokens"] + (grown["pulled_tokens"] or 0) > 0


def test_many_at_once(served: ServedModel) -> None:
    common = served.prompt(70).prompt
    several = [
        served.prompt(5 + 9 * n, 8) if n % 3 else served.prompt(75 + n, 8, start=common)
        for n in range(NUM_AT_ONCE)
    ]
    with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        list(threads.map(served.serve, several))


def test_moved_in_mid_decode(served: ServedModel, sizes: tuple[int, int]) -> None:
    """The decode worker dies: the prefill worker goes on from what it has of the prompt."""
    cluster, expected = served.cluster, served.prompt(150, 30)
    told = cluster.tell("d0", "hold steps")
    cluster.tell("d0", "pass steps 4")
    answer = served.ask_later(expected, "moved")
    cluster.wait_told("d0", "held steps", told)
    wait_until(lambda: cluster.record("moved")["num_tokens"] == 5, "five tokens")
    cluster.workers["d0"].kill()
    assert_exact(answer.result(60), expected)
    cluster.spawn("d0", "decode", block_tokens=sizes[1])  # of another pool than before
    cluster.wait_ready("d0")


def refusal(process: Process, named: str) -> str:
    """The log of a worker, once the router has refused it."""
    wait_until(lambda: "not registered" in process.logged(), "a refusal", START_S)
    logged = process.logged()
    assert named in logged, logged
    return logged


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    cluster = start(tmp_path, "qwen3", CHUNKED)
    with running(cluster, p0="prefill"):
        cluster.spawn("d0", "decode", hash_block_tokens=16, block_tokens=32)
        refusal(cluster.workers["d0"], "hash_block_tokens: revision 8, d0 16")
        cluster.spawn("d1", "decode", dtype="bfloat16")
        refusal(cluster.workers["d1"], "dtype: 'bfloat16' != 'float32'")
        told = (cluster.logs / "router").read_text()
        assert all(f"{name}: Contract(model_fingerprint=" in told for name in ("p0", "d1"))
        assert set(cluster.known()) == {"p0"}
