"""Faults with real processes under load; see `Soak` for what must come out of each round."""

import os
import secrets
import time
from collections.abc import Iterator

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.process import soak as soak_module
from tests.process.harness import Cluster, running, wait_until
from tests.process.network import Network, Place, UnavailableError, network
from tests.process.served_model import WINDOW, ServedModel, WrongAnswerError, assert_exact
from tests.process.soak import (
    END_S,
    QUARANTINE_SHARES,
    ROUTER_OPTIONS,
    WORKER_OPTIONS,
    Outcomes,
    Soak,
)
from tests.process.soak_faults import FAULTS, faults, nothing

pytestmark = pytest.mark.timeout(1200)

SEED = os.environ.get("DISAGG_SOAK_SEED")
"""Of every run of rounds; without it the long run draws its own."""
NUM_ROUNDS = int(os.environ.get("DISAGG_SOAK_ROUNDS") or 200)
SLOW_S = 3600
CUT_S = 25.0


@pytest.fixture(scope="module")
def link() -> Iterator[Network | str]:
    """The network, or why there is none."""
    try:
        with network() as made:
            yield made
    except UnavailableError as error:
        yield str(error)


@pytest.fixture(scope="module")
def soak(link: Network | str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Soak]:
    """Over TCP, where a READ needs its owner; without namespaces over the loopback."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("soak")
    model_dir = make_checkpoint(folder / "gemma3", "gemma3", window=WINDOW)
    cluster = Cluster(model_dir, folder, WORKER_OPTIONS, dict(ROUTER_OPTIONS))
    if isinstance(link, str):
        here = Place(environment={"UCX_TLS": "tcp"})
        cluster.places = {"p0": here, "d0": here}
    else:
        cluster.places = dict(zip(("p0", "d0"), link.places, strict=True))
        cluster.router_options["host"] = link.host
    with running(cluster, p0="prefill", d0="decode"):
        yield Soak(ServedModel(cluster), None if isinstance(link, str) else link)


def run(soak: Soak, rounds: list[str], seed: str) -> dict[str, Outcomes]:
    """What became of the requests, by fault; printed also when a round fails."""
    found: dict[str, Outcomes] = {}
    try:
        for n, fault in enumerate(rounds):
            soak.rng.seed(f"{seed}/{n}")
            begun_s = time.monotonic()
            try:
                leaving = 0.8 if fault == "clients leave" else 0.15
                outcome = soak.run(FAULTS[fault], share_leaving=leaving)
            except BaseException as error:
                error.add_note(f"round {n} ({fault}) of DISAGG_SOAK_SEED={seed}")
                raise
            took_s = time.monotonic() - begun_s
            print(f"{seed}/{n} {fault}: {outcome} ({took_s:.1f} s)", flush=True)
            found.setdefault(fault, Outcomes()).add(outcome)
    finally:
        for fault, outcome in found.items():
            print(f"all of {fault}: {outcome}")
    return found


QUICK = (
    "nothing",
    "clients leave",
    "no memory anywhere",
    "READs to a stopped owner",
    "stop d0",
    "cut",
    "cut, READs posted",
    "kill p0",
    "kill d0",
)


CHEAP = (
    "clients leave",
    "stop p0 shortly",
    "stop d0 shortly",
    "no memory at p0",
    "no memory at d0",
    "no memory anywhere",
    "leases ended",
    "cut shortly",
)
"""Rounds of a second or two, without a restart; twice as often as the others."""
BITING = ("kill both", "stop d0 until it is dropped", "stop p0, kill d0", "no memory anywhere")
"""That hit nothing is unlikely after some rounds; then they would show nothing."""


def test_a_round_of_each_fault(soak: Soak) -> None:
    found = run(soak, [fault for fault in QUICK if fault in faults(soak.network)], SEED or "each")
    assert set(found["nothing"].requests) <= {"exact", "left"}
    assert found["nothing"].requests["exact"] > 0
    assert found["clients leave"].requests["left"] > 0
    assert any(outcome.causes for outcome in found.values())  # they did hit something


def test_the_link_was_cut(link: Network | str) -> None:
    """What a skip is for: without it a machine without namespaces would look like one with."""
    if isinstance(link, str):
        pytest.skip(f"the link between workers was never cut: {link}")
    assert "cut" in faults(link)


@pytest.mark.slow
@pytest.mark.timeout(SLOW_S)
def test_hundreds_of_rounds(soak: Soak) -> None:
    known = faults(soak.network)
    cycle = [*known, *(fault for fault in known if fault in CHEAP)]
    rounds = [cycle[n % len(cycle)] for n in range(NUM_ROUNDS)]
    found = run(soak, rounds, SEED or secrets.token_hex(4))
    assert not found["nothing"].requests["error"]
    if 2 * len(cycle) <= NUM_ROUNDS:
        assert [fault for fault in known if not found[fault].requests["exact"]] == []
        assert [fault for fault in BITING if fault in found and not found[fault].causes] == []


@pytest.mark.slow
@pytest.mark.parametrize("share", QUARANTINE_SHARES)
def test_a_link_cut_for_long_with_reads_in_progress(
    soak: Soak, link: Network | str, share: float
) -> None:
    """Longer than a READ may take and than streams live: stuck READs, and both workers lose the
    other. Meanwhile all is served without a hand-over; with the link hand-overs come back."""
    if isinstance(link, str):
        pytest.skip(link)
    cluster, expected, soak.round = soak.cluster, soak.prompts()[-1], Outcomes()
    cluster.workers["d0"].kill()
    cluster.spawn("d0", "decode", quarantine_share_max=share)
    cluster.wait_ready("d0")
    told = cluster.tell("d0", "hold reads")
    answer = soak.served.ask_later(expected, f"cut-{share}")
    cluster.wait_told("d0", "held reads", told)
    link.cut()
    try:
        cluster.tell("d0", "pass reads")
        end_s = time.monotonic() + CUT_S
        assert_exact(answer.result(END_S), expected)
        (first, *_) = cluster.record(f"cut-{share}")["generations"]
        assert first["cause"].split(":")[0] in ("read_stuck", "peer_lost", "worker_lost"), first
        if share == max(QUARANTINE_SHARES):
            assert cluster.status("d0").stats.num_blocks_quarantined > 0
        else:
            wait_until(lambda: "d0" not in cluster.living(), "too much in quarantine")
        n = 0
        while time.monotonic() < end_s:
            n += 1
            assert_exact(soak.served.ask(expected, f"meanwhile-{share}-{n}"), expected)
    finally:
        link.mend()
    soak.recover()
    soak.settle()
    print(f"cut for {CUT_S} s, share {share}: {n} requests meanwhile; {soak.round}")


# --- controls: the checker sees what it is for


def test_another_token_fails_the_round(soak: Soak) -> None:
    soak.rng.seed("another token")
    for group in range(6):
        soak.cluster.tell("d0", f"corrupt {group}")
    try:
        with pytest.raises(WrongAnswerError):
            soak.run(nothing, num_requests=20)
    finally:
        soak.cluster.tell("d0", "intact")
        soak.cluster.wait_quiescent()  # what still goes on may put wrong blocks into the cache
        soak.cluster.tell("d0", "forget")
    soak.settle()


def test_a_block_that_is_lost_fails_the_round(soak: Soak, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_module, "SETTLE_S", 1.0)
    leave = soak.num_usable["d0"] - 1
    soak.cluster.tell("d0", f"take {leave}")
    try:
        with pytest.raises(AssertionError, match="d0 holds"):
            soak.settle()
    finally:
        soak.cluster.tell("d0", "give")
        monkeypatch.undo()
    soak.settle()


def test_a_request_that_hangs_fails_the_round(soak: Soak, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_module, "END_S", 1.0)
    soak.rng.seed("a hang")
    soak.cluster.tell("p0", "hold steps")
    try:
        with pytest.raises(AssertionError, match="did not end"):
            soak.run(nothing)
    finally:
        soak.cluster.tell("p0", "pass steps")
    monkeypatch.undo()
    soak.settle()


def test_a_worker_that_ends_without_a_reason_fails_the_round(soak: Soak) -> None:
    soak.cluster.workers["p0"].ask_to_stop()
    soak.cluster.workers["p0"].popen.wait(60)
    with pytest.raises(AssertionError, match="p0 ended with 0"):
        soak.recover()  # it stays dead: this is the last test
