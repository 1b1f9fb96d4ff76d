"""Faults with real processes under load; see `Soak` for what must come out of each round."""

import os
import secrets
from collections.abc import Iterator

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.process import soak as soak_module
from tests.process.harness import Cluster, running
from tests.process.network import Network, Place, UnavailableError, network
from tests.process.served_model import WINDOW, ServedModel, WrongAnswerError
from tests.process.soak import ROUTER_OPTIONS, WORKER_OPTIONS, Outcomes, Soak
from tests.process.soak_faults import FAULTS, faults, nothing

pytestmark = pytest.mark.timeout(600)

SEED = os.environ.get("DISAGG_SOAK_SEED") or secrets.token_hex(4)
NUM_ROUNDS = int(os.environ.get("DISAGG_SOAK_ROUNDS") or 200)
SLOW_S = 3600


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
        yield Soak(ServedModel(cluster), None if isinstance(link, str) else link, SEED)


def run(soak: Soak, rounds: list[str]) -> dict[str, Outcomes]:
    """What became of the requests, by fault; printed also when a round fails."""
    found: dict[str, Outcomes] = {}
    try:
        for n, fault in enumerate(rounds):
            soak.rng.seed(f"{SEED}/{n}")
            try:
                leaving = 0.8 if fault == "clients leave" else 0.15
                outcome = soak.run(FAULTS[fault], share_leaving=leaving)
            except BaseException as error:
                error.add_note(f"round {n} ({fault}) of DISAGG_SOAK_SEED={SEED}")
                raise
            print(f"{SEED}/{n} {fault}: {outcome}", flush=True)
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


def test_a_round_of_each_fault(soak: Soak) -> None:
    found = run(soak, [fault for fault in QUICK if fault in faults(soak.network)])
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
    rounds = [known[n % len(known)] for n in range(NUM_ROUNDS)]
    found = run(soak, rounds)
    for fault, outcome in found.items():
        assert outcome.requests["exact"] > 0, fault
        if fault == "nothing":
            assert not outcome.requests["error"]


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
