"""Cached history is pulled from where it is, between any two workers; a lost pull costs time."""

import random
from collections.abc import Iterator

import pytest
import torch

from disagg.messages.reports import GroupTransfer
from tests.checkpoints import make_checkpoint, reference_generate
from tests.process.direct_router import Asked, Workers
from tests.process.harness import wait_until
from tests.process.served_model import BLOCK_TOKENS, GAP_MIN, PRINTABLE_IDS, WINDOW

pytestmark = pytest.mark.timeout(600)

HISTORY = 150
TURN = 20
NUM_TOKENS = 6
BOUNDARY = 144
"""The last block end in the history."""
OPTIONS = {"max_step_tokens": 96, "read_handle_bytes_max": 1 << 16, "reserve_timeout_ms": 1_000}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("pulls")
    model_dir = make_checkpoint(folder / "gemma3", "gemma3", window=WINDOW)
    workers = Workers(model_dir, folder, OPTIONS)
    try:
        workers.start("p0", "p1", "d0", "d1")
        yield workers
    finally:
        workers.end()


@pytest.fixture
def workers(started: Workers) -> Iterator[Workers]:
    started.restore()
    yield started
    for name in started.living():
        for gate in ("steps", "reads", "dones"):
            started.tell(name, f"pass {gate}")
    started.wait_quiescent()


class Turns:
    """A first turn that was decoded somewhere, and the next one with what it must answer."""

    def __init__(self, workers: Workers, salt: str) -> None:
        for attempt in range(50):
            rng = random.Random(f"{salt}/{attempt}")
            self.history = tuple(rng.choices(PRINTABLE_IDS, k=HISTORY))
            self.prompt = self.history + tuple(rng.choices(PRINTABLE_IDS, k=TURN))
            answer, _, gap = reference_generate(workers.model_dir, self.prompt, NUM_TOKENS)
            if gap > GAP_MIN:
                self.answer = answer
                return
        raise AssertionError("no clear prompt")


@pytest.fixture
def turns(workers: Workers, request: pytest.FixtureRequest) -> Turns:
    return Turns(workers, request.node.name)


def remember(workers: Workers, turns: Turns, name: str) -> None:
    """Let a worker serve the history alone."""
    workers.submit(turns.history, 1, name, name).wait()
    workers.wait_quiescent()


def assert_in_window_only(groups: tuple[GroupTransfer, ...], boundary: int) -> None:
    """Of windows the blocks that a query at the boundary sees, of full attention all."""
    num_blocks = boundary // BLOCK_TOKENS
    first = (boundary - WINDOW + 1) // BLOCK_TOKENS
    for group in groups:
        seen = num_blocks - (first if group.window_tokens else 0)
        assert group.block_map == "." * (num_blocks - seen) + "p" * seen
        assert group.pulled_blocks == seen
        assert group.pulled_bytes == seen * group.full_bytes // num_blocks


PLANS = [
    ("p0", "d0", "d0"),  # prefill from its own decode worker
    ("p0", "d0", "d1"),
    ("p0", "d0", "p1"),
    ("d1", "d1", "d0"),  # local, from a decode worker
    ("p1", "p1", "p0"),
]


@pytest.mark.parametrize(("prefill", "decode", "owner"), PLANS)
def test_history_is_pulled_from_where_it_is(
    workers: Workers, turns: Turns, prefill: str, decode: str, owner: str
) -> None:
    remember(workers, turns, owner)
    before = workers.counters(prefill).get("prefix_pulled_bytes", 0)
    asked = workers.submit(turns.prompt, NUM_TOKENS, prefill, decode, (owner, BOUNDARY))
    assert asked.wait() == turns.answer
    report = asked.pull_report()
    assert not report.failed
    assert (report.owner.worker_id, report.num_tokens) == (owner, BOUNDARY)
    assert_in_window_only(report.groups, BOUNDARY)
    pulled = sum(group.pulled_bytes for group in report.groups)
    assert workers.counters(prefill)["prefix_pulled_bytes"] - before == pulled > 0
    computed = asked.prefill_report()
    assert (computed.hit_tokens, computed.pulled_tokens) == (0, BOUNDARY)
    assert computed.computed_tokens == HISTORY + TURN - BOUNDARY
    workers.wait_quiescent()
    # What was pulled is cached here now: the same prompt needs no pull.
    again = workers.submit(turns.prompt, NUM_TOKENS, prefill, prefill, (owner, BOUNDARY))
    assert again.wait() == turns.answer
    assert again.prefill_report().hit_tokens >= BOUNDARY


def test_a_part_that_is_here_is_not_pulled(workers: Workers, turns: Turns) -> None:
    """Of full attention what is here counts by itself; of windows the boundary's are pulled."""
    remember(workers, turns, "d0")
    workers.submit(turns.history[:70], 1, "p0", "p0").wait()
    asked = workers.submit(turns.prompt, NUM_TOKENS, "p0", "d0", ("d0", BOUNDARY))
    assert asked.wait() == turns.answer
    *windows, full = asked.pull_report().groups
    assert full.block_map == "hhhhppppp"
    assert {group.block_map for group in windows} == {".......pp"}
    assert (asked.prefill_report().hit_tokens, asked.prefill_report().pulled_tokens) == (64, 80)


def test_a_wrong_belief_about_the_owner_costs_nothing(workers: Workers, turns: Turns) -> None:
    """It has less, or nothing at all, or more than is asked for."""
    asked = workers.submit(turns.prompt, NUM_TOKENS, "p0", "d0", ("d1", BOUNDARY))
    assert asked.wait() == turns.answer
    assert asked.pull_report().failed.startswith("none")
    workers.restore()
    remember(workers, turns, "d1")
    asked = workers.submit(turns.prompt, NUM_TOKENS, "p0", "d0", ("d1", 10_000))
    assert asked.wait() == turns.answer
    assert asked.pull_report().num_tokens == BOUNDARY  # it has the history alone
    assert_in_window_only(asked.pull_report().groups, BOUNDARY)
    workers.restore()
    remember(workers, turns, "d1")
    asked = workers.submit(turns.prompt, NUM_TOKENS, "p0", "d0", ("d1", 100))
    assert asked.wait() == turns.answer
    assert_in_window_only(asked.pull_report().groups, 96)


def hold_pull(workers: Workers, turns: Turns, gate: str) -> Asked:
    """A pull from d1 by p0 that waits before a READ, or before a READ's end is told."""
    remember(workers, turns, "d1")
    told = workers.tell("p0", f"hold {gate}")
    asked = workers.submit(turns.prompt, NUM_TOKENS, "p0", "d0", ("d1", BOUNDARY))
    workers.processes["p0"].wait_line(f"held {gate}", after=told)
    return asked


@pytest.mark.parametrize("gate", ["reads", "dones"])
def test_the_owner_is_killed_in_mid_pull(workers: Workers, turns: Turns, gate: str) -> None:
    asked = hold_pull(workers, turns, gate)
    workers.kill("d1")
    # It goes on without waiting for the READs, whose destinations stay held.
    assert asked.wait() == turns.answer
    assert asked.pull_report().failed.startswith("peer_lost")
    (inbound,) = workers.status("p0").inbound
    assert inbound.num_blocks > 0
    workers.tell("p0", f"pass {gate}")
    workers.wait_quiescent()


@pytest.mark.parametrize("gate", ["reads", "dones"])
def test_without_a_fault_what_was_stopped_goes_on(
    workers: Workers, turns: Turns, gate: str
) -> None:
    """Control of the test above: it is the death that it sees, not the gate."""
    asked = hold_pull(workers, turns, gate)
    workers.tell("p0", f"pass {gate}")
    assert asked.wait() == turns.answer
    assert asked.pull_report().num_tokens == BOUNDARY


def test_a_lease_ended_before_the_commit_is_not_believed(workers: Workers, turns: Turns) -> None:
    asked = hold_pull(workers, turns, "dones")
    (lease,) = workers.status("d1").leases
    assert lease.state == "SEALED"
    workers.tell("d1", "end_leases")
    workers.tell("p0", "pass dones")
    assert asked.wait() == turns.answer
    assert asked.pull_report().failed.startswith("commit_refused")
    assert workers.counters("p0")["prefix_pulls_failed_commit_refused"] >= 1


def test_a_cancel_in_mid_pull_ends_the_lease(workers: Workers, turns: Turns) -> None:
    asked = hold_pull(workers, turns, "reads")
    asked.cancel()
    wait_until(lambda: not workers.status("d1").leases, "the lease to end")
    assert workers.status("p0").inbound  # the READ at the gate may still land
    workers.tell("p0", "pass reads")
    workers.wait_quiescent()


@pytest.mark.parametrize("group", [0, 5])
def test_a_corrupted_block_is_seen(workers: Workers, turns: Turns, group: int) -> None:
    """Control: the comparison of all these tests fails if one pulled block is wrong."""
    remember(workers, turns, "d1")
    told = workers.tell("p0", f"corrupt {group}")
    asked = workers.submit(turns.prompt, NUM_TOKENS, "p0", "d0", ("d1", BOUNDARY))
    tokens = asked.wait()
    workers.processes["p0"].wait_line(f"corrupted {group} ", after=told)
    assert tokens != turns.answer
