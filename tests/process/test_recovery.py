"""A READ fails while the lease lives: what arrived is kept, what did not is computed, exactly.

The block that is lost is filled with NaN: whoever reads it all the same fails its step.
"""

import random
from collections.abc import Iterator

import pytest
import torch

from disagg.messages.session import EndReason
from tests.checkpoints import make_checkpoint, reference_generate
from tests.process.direct_router import Workers
from tests.process.harness import wait_until
from tests.process.served_model import GAP_MIN, PRINTABLE_IDS, WINDOW

pytestmark = pytest.mark.timeout(600)

LENGTH, NUM_TOKENS = 150, 6
BOUNDARY = 144
OPTIONS = {"max_step_tokens": 96, "read_handle_bytes_max": 4096}
"""One block per READ."""
LAST = 8
"""The last block below the boundary: in every window, and of full attention."""
HOLE = 5


def started(tmp_path_factory: pytest.TempPathFactory, family: str) -> Iterator[Workers]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(f"recovery-{family}")
    workers = Workers(make_checkpoint(folder / family, family, window=WINDOW), folder, OPTIONS)
    try:
        workers.start("p0", "d0")
        yield workers
    finally:
        workers.end()


@pytest.fixture(scope="module")
def hybrid_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    yield from started(tmp_path_factory, "gemma3")


@pytest.fixture
def hybrid(hybrid_workers: Workers) -> Iterator[Workers]:
    """Five window groups and one of full attention."""
    hybrid_workers.restore()
    yield hybrid_workers
    hybrid_workers.wait_quiescent()


@pytest.fixture(scope="module")
def full_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    yield from started(tmp_path_factory, "llama")


@pytest.fixture
def full(full_workers: Workers) -> Iterator[Workers]:
    """One group of full attention."""
    full_workers.restore()
    yield full_workers
    full_workers.wait_quiescent()


def clear_prompt(workers: Workers, salt: str) -> tuple[tuple[int, ...], list[int]]:
    """A prompt and what must follow it."""
    for attempt in range(50):
        rng = random.Random(f"{salt}/{attempt}")
        prompt = tuple(rng.choices(PRINTABLE_IDS, k=LENGTH))
        answer, _, gap = reference_generate(workers.model_dir, prompt, NUM_TOKENS)
        if gap > GAP_MIN:
            return prompt, answer
    raise AssertionError("no clear prompt")


def fail(workers: Workers, name: str, group: int, position: int) -> int:
    return workers.tell(name, f"fail {group} {position}")


@pytest.mark.parametrize("group", range(6))
def test_a_prefix_pull_that_lost_a_block_of_any_group(hybrid: Workers, group: int) -> None:
    prompt, answer = clear_prompt(hybrid, f"pull {group}")
    hybrid.submit(prompt, 1, "d0", "d0").wait()
    before = hybrid.counters("p0").get("transfers_recovered", 0)
    told = fail(hybrid, "p0", group, LAST)
    asked = hybrid.submit(prompt, NUM_TOKENS, "p0", "p0", ("d0", BOUNDARY))
    assert asked.wait() == answer
    hybrid.processes["p0"].wait_line(f"failed ({group}, {LAST})", after=told)
    failed = asked.pull_report().failed
    assert failed.startswith(f"read_failed: blocks {group}:{LAST} (group:block)"), failed
    assert hybrid.counters("p0")["transfers_recovered"] == before + 1


@pytest.mark.parametrize("group", range(6))
def test_a_hand_over_that_lost_a_block_of_any_group(hybrid: Workers, group: int) -> None:
    prompt, answer = clear_prompt(hybrid, f"hand-over {group}")
    told = fail(hybrid, "d0", group, LAST)
    asked = hybrid.submit(prompt, NUM_TOKENS, "p0", "d0")
    (ended,) = wait_until(asked.ended, "the decode part to end")
    hybrid.processes["d0"].wait_line(f"failed ({group}, {LAST})", after=told)
    assert ended.reason is EndReason.READ_FAILED
    assert f"blocks {group}:{LAST} (group:block)" in ended.message
    # Token 0 has another stream than the end of the decode part.
    assert wait_until(asked.tokens, "token 0") == answer[:1]
    # As the router does: the same worker, after the tokens that were accepted.
    again = hybrid.submit((*prompt, answer[0]), NUM_TOKENS - 1, "d0", "d0")
    assert again.wait() == answer[1:]


def test_what_arrived_before_a_hole_is_not_pulled_or_computed_again(full: Workers) -> None:
    prompt, answer = clear_prompt(full, "hole")
    full.submit(prompt, 1, "d0", "d0").wait()
    fail(full, "p0", 0, HOLE)
    asked = full.submit(prompt, NUM_TOKENS, "p0", "p0", ("d0", BOUNDARY))
    assert asked.wait() == answer
    report = asked.prefill_report()
    assert (report.hit_tokens, report.pulled_tokens) == (0, HOLE * 16)
    assert report.computed_tokens == LENGTH - HOLE * 16


def test_after_a_lost_hand_over_only_the_rest_is_pulled_from_elsewhere(full: Workers) -> None:
    prompt, answer = clear_prompt(full, "rest")
    fail(full, "d0", 0, HOLE)
    asked = full.submit(prompt, NUM_TOKENS, "p0", "d0")
    (ended,) = wait_until(asked.ended, "the decode part to end")
    assert ended.reason is EndReason.READ_FAILED
    full.tell("d0", "intact")
    plan = ("p0", BOUNDARY)
    again = full.submit((*prompt, answer[0]), NUM_TOKENS - 1, "d0", "d0", plan)
    assert again.wait() == answer[1:]
    (group,) = again.pull_report().groups
    assert group.block_map == "h" * HOLE + "p" * (9 - HOLE)
    report = again.prefill_report()
    assert (report.hit_tokens, report.pulled_tokens) == (HOLE * 16, BOUNDARY - HOLE * 16)


def test_without_a_fault_nothing_is_recovered(full: Workers) -> None:
    """Control: it is the error that the other tests see."""
    prompt, answer = clear_prompt(full, "hole")
    full.submit(prompt, 1, "d0", "d0").wait()
    before = full.counters("p0").get("transfers_recovered", 0)
    asked = full.submit(prompt, NUM_TOKENS, "p0", "p0", ("d0", BOUNDARY))
    assert asked.wait() == answer
    assert asked.prefill_report().pulled_tokens == BOUNDARY
    assert full.counters("p0").get("transfers_recovered", 0) == before
