"""Bits that flip on their way between real workers: seen before the commit, or served without."""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_checkpoint, reference_generate
from tests.process.direct_router import Workers
from tests.process.harness import MODEL, Cluster, running, wait_until
from tests.process.served_model import (
    GAP_MIN,
    PRINTABLE_IDS,
    WINDOW,
    Expected,
    ServedModel,
    WrongAnswerError,
    is_exact,
)

pytestmark = pytest.mark.timeout(600)

LENGTH, NUM_TOKENS, BOUNDARY = 150, 6, 144
"""A prompt whose last block is partial, and the boundary of its prefixes."""
OPTIONS: dict[str, Any] = {"max_step_tokens": 96, "checksums": True}
FLIPPED_GROUPS = (0, 5)
"""A window's, and full attention's."""
ROLES = {"p0": "prefill", "d0": "decode"}
MISMATCHES = 'disagg_worker_checksum_mismatches_total{model_name="tiny",role="decode",worker="d0"}'


@pytest.fixture(scope="module")
def checked_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checksums")
    directory = make_checkpoint(folder / "gemma3", "gemma3", window=WINDOW)
    options = OPTIONS | {"reserve_timeout_ms": 30_000, "reserve_passes_max": 1_000}
    cluster = Cluster(directory, folder, options, {"worker_silent_ms": 60_000})
    with running(cluster, **ROLES):
        yield ServedModel(cluster)


@pytest.fixture
def checked(checked_cluster: ServedModel) -> Iterator[ServedModel]:
    """Behind a router; nothing is cached, all that is free is poisoned."""
    checked_cluster.restore()
    yield checked_cluster
    checked_cluster.settle()


def serve_corrupted(served: ServedModel) -> dict[str, Any]:
    """Ask while blocks are overwritten behind each READ; the request's record.

    Raises:
        WrongAnswerError: its tokens are wrong.
    """
    expected = served.prompt(LENGTH, NUM_TOKENS, salt="flips")
    told = [served.cluster.tell("d0", f"corrupt {group}") for group in FLIPPED_GROUPS]
    request_id = served.new_id()
    try:
        assert is_exact(partial(served.ask, expected, request_id), expected), "an error"
    finally:
        for group in FLIPPED_GROUPS:
            served.cluster.wait_told("d0", f"corrupted {group} ", told[0])
        served.cluster.tell("d0", "intact")
    return served.cluster.record(request_id)


def test_blocks_that_come_well_are_committed(checked: ServedModel) -> None:
    """Control: it is the flipped bits that the tests see; prompts of all ends, computed and hit."""
    mismatches = checked.cluster.counters("d0")["checksum_mismatches"]
    for length in (1, 33, LENGTH):
        expected = checked.prompt(length, NUM_TOKENS)
        for _ in range(2):
            hand_over(checked, expected)
            checked.cluster.tell("d0", "forget")
    assert checked.cluster.counters("d0")["checksum_mismatches"] == mismatches
    for name in ("p0", "d0"):
        labels = f'model_name="{MODEL}",role="{ROLES[name]}",worker="{name}"'
        series = f"disagg_worker_checksummed_blocks_total{{{labels}}}"
        wait_until(partial(checked.cluster.metric, series), f"checksums of {name} to be counted")


def test_a_client_gets_exact_tokens_whatever_came(checked: ServedModel) -> None:
    cluster, before = checked.cluster, checked.cluster.metric(MISMATCHES)
    record = serve_corrupted(checked)
    first, second, *_ = record["generations"]
    assert first["cause"].startswith("read_failed: blocks "), first
    for group in FLIPPED_GROUPS:
        assert f" {group}:" in first["cause"], first
    assert "checksums differ" in first["cause"]
    assert not second["cause"], "the pair is left alone: the next plan is another one"
    assert second["local"], second
    wait_until(
        lambda: cluster.metric(MISMATCHES) >= before + len(FLIPPED_GROUPS), "the router to hear"
    )
    # Both look at their own transport, as after every READ that has failed.
    for name in ("p0", "d0"):
        assert "the own transport is checked" in cluster.workers[name].logged()


def hand_over(served: ServedModel, expected: Expected) -> None:
    """Ask, again while the pair rests after an earlier test."""

    def is_handed_over() -> bool:
        request_id = served.new_id()
        assert is_exact(partial(served.ask, expected, request_id), expected)
        (generation,) = served.cluster.record(request_id)["generations"]
        return not generation["local"]

    wait_until(is_handed_over, "a hand-over")


def test_without_checksums_the_tokens_are_wrong(gemma3: ServedModel) -> None:
    """Control: the same bytes, committed."""
    with pytest.raises(WrongAnswerError):
        serve_corrupted(gemma3)
    assert gemma3.cluster.counters("d0")["checksum_mismatches"] == 0


# -- workers without a router -----------------------------------------------------------------


@pytest.fixture(scope="module", params=["gemma3", "nemotron_h"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Workers]:
    """With windows, or with linear states."""
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp(f"checksums-{request.param}")
    directory = make_checkpoint(folder / request.param, request.param, window=WINDOW)
    workers = Workers(directory, folder, OPTIONS)
    try:
        workers.start("p0", "d0")
        yield workers
    finally:
        workers.end()


@pytest.fixture
def workers(pair: Workers) -> Iterator[Workers]:
    pair.restore()
    yield pair
    pair.wait_quiescent()


def clear_prompt(workers: Workers, salt: str) -> tuple[tuple[int, ...], list[int]]:
    """A prompt and what must follow it."""
    for attempt in range(50):
        rng = random.Random(f"{salt}/{attempt}")
        prompt = tuple(rng.choices(PRINTABLE_IDS, k=LENGTH))
        answer, _, gap = reference_generate(workers.model_dir, prompt, NUM_TOKENS)
        if gap > GAP_MIN:
            return prompt, answer
    raise AssertionError("no clear prompt")


def test_a_prefix_pull_with_flipped_bits_is_computed(workers: Workers) -> None:
    for group in (0, 1):
        prompt, answer = clear_prompt(workers, f"pull {group}")
        workers.submit(prompt, 1, "d0", "d0").wait()
        before = workers.counters("p0")["checksum_mismatches"]
        told = workers.tell("p0", f"corrupt {group}")
        asked = workers.submit(prompt, NUM_TOKENS, "p0", "p0", ("d0", BOUNDARY))
        assert asked.wait() == answer
        workers.processes["p0"].wait_line(f"corrupted {group} ", after=told)
        assert "checksums differ" in asked.pull_report().failed
        assert workers.counters("p0")["checksum_mismatches"] > before
        workers.restore()


def test_a_prefix_pull_and_a_hand_over_that_come_well(workers: Workers) -> None:
    prompt, answer = clear_prompt(workers, "well")
    workers.submit(prompt, 1, "d0", "d0").wait()
    asked = workers.submit(prompt, NUM_TOKENS, "p0", "p0", ("d0", BOUNDARY))
    assert asked.wait() == answer
    report = asked.pull_report()
    assert (report.failed, report.num_tokens > 0) == ("", True)
    workers.restore()
    assert workers.submit(prompt, NUM_TOKENS, "p0", "d0").wait() == answer
    assert workers.counters("d0")["transfers_committed"] > 0
