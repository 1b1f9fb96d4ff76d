"""A worker whose transport broke heals, or is not there any more; it never stays and fails."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.process.conftest import OPTIONS
from tests.process.harness import Cluster, running, wait_until
from tests.process.network import Network, UnavailableError, network
from tests.process.served_model import WINDOW, ServedModel, assert_exact, is_exact

pytestmark = pytest.mark.timeout(600)

SILENT_MS = 6_000
"""So long a router leaves a pair alone whose READ failed; a minute would be waited for."""


def test_a_worker_that_can_read_from_nobody_ends_and_its_next_life_reads(
    gemma3: ServedModel,
) -> None:
    cluster, expected = gemma3.cluster, gemma3.prompt(150)
    process, old = cluster.workers["d0"], cluster.epochs["d0"]
    cluster.tell("d0", "break posts")
    is_exact(partial(gemma3.ask, expected, "broken"), expected)
    assert len(cluster.record("broken")["generations"]) > 1
    wait_until(lambda: process.popen.poll() is not None, "the worker to end")
    # Its tick notices, or the next READ that the core wants posted.
    assert re.search("cannot go on: (transport: |RemoteFault: the KV transport)", process.logged())
    wait_until(lambda: "d0" not in cluster.known(), "the router to drop it")
    assert cluster.http.get("/ready").status_code == 200  # the other one serves alone
    assert_exact(gemma3.ask(expected, "alone"), expected)
    assert cluster.record("alone")["generations"][0]["decode"]["worker_id"] == "p0"

    cluster.spawn("d0", "decode")
    cluster.wait_ready("d0")
    assert cluster.epochs["d0"] != old
    assert gemma3.serve(expected)["decode"]["epoch"] == cluster.epochs["d0"]


def test_with_nobody_left_the_router_is_not_ready(gemma3: ServedModel) -> None:
    cluster, expected = gemma3.cluster, gemma3.prompt(150)
    cluster.workers["p0"].kill()
    wait_until(lambda: "p0" not in cluster.known(), "the router to drop p0")
    assert cluster.http.get("/ready").status_code == 200
    cluster.workers["d0"].kill()
    wait_until(lambda: cluster.http.get("/ready").status_code == 503, "not ready")
    assert not is_exact(partial(gemma3.ask, expected, "nobody"), expected)


def test_a_dead_owner_does_not_end_its_reader(gemma3: ServedModel) -> None:
    """Control: a READ that fails for the owner's sake leaves the reader as it is."""
    cluster, expected = gemma3.cluster, gemma3.prompt(150)
    before = dict(cluster.epochs)
    told = cluster.tell("d0", "hold reads")
    answer = gemma3.ask_later(expected, "held")
    cluster.wait_told("d0", "held reads", told)
    cluster.workers["p0"].kill()
    told = cluster.tell("d0", "hold dones")
    cluster.tell("d0", "pass reads")
    cluster.wait_told("d0", "held dones", told)  # the READ has failed
    cluster.tell("d0", "pass dones")
    assert_exact(answer.result(60), expected)
    cluster.spawn("p0", "prefill")
    cluster.wait_ready("p0")
    generation = gemma3.serve(gemma3.prompt(150, salt="after"))
    assert generation["decode"]["epoch"] == before["d0"]
    assert generation["prefill"]["epoch"] != before["p0"]


# --- an owner, whose own READs nobody misses


@pytest.mark.parametrize("share", [0.6, 0.05], ids=["reader stays", "reader ends"])
def test_an_owner_whose_device_is_gone_ends_and_its_next_life_lends(
    share: float, tmp_path: Path
) -> None:
    """Its streams stay: nobody but its readers sees that it cannot lend. Some of them end."""
    torch.set_num_threads(1)
    try:
        with network() as made:
            made.separate_data()
            lose_the_owners_device(made, share, tmp_path)
    except UnavailableError as error:
        pytest.skip(f"no device was ever taken away: {error}")


def lose_the_owners_device(made: Network, share: float, folder: Path) -> None:
    model_dir = make_checkpoint(folder / "gemma3", "gemma3", window=WINDOW)
    cluster = Cluster(
        model_dir,
        folder,
        {"max_step_tokens": 96, "num_blocks": 240, "read_stuck_ms": 1_500},
        {"worker_silent_ms": 3_000, "host": made.host},
        dict(zip(("p0", "d0"), made.places, strict=True)),
    )
    cluster.worker_options["quarantine_share_max"] = share
    with running(cluster, p0="prefill", d0="decode"):
        served = ServedModel(cluster)
        expected, before = served.prompt(300), dict(cluster.epochs)
        assert served.serve(expected)["decode"]["epoch"] == before["d0"]
        cluster.tell("d0", "forget")

        told = cluster.tell("p0", "hold checks")
        made.take_data(0)
        assert_exact(served.ask(expected, "gone"), expected)
        assert cluster.record("gone")["generations"][0]["cause"]
        cluster.wait_told("p0", "held checks", told)
        # Control: who does not look at itself stays and looks healthy.
        view = cluster.known()["p0"]
        assert view["ready"]
        assert view["info"]["incarnation"]["epoch"] == before["p0"]
        owner, reader = cluster.workers["p0"], cluster.workers["d0"]
        assert owner.popen.poll() is None

        cluster.tell("p0", "pass checks")
        wait_until(lambda: owner.popen.poll() is not None, "the owner to end")
        assert "the own transport is checked" in owner.logged()
        assert "cannot go on: transport: " in owner.logged()
        wait_until(
            lambda: cluster.known().get("p0", {}).get("ready") is not True, "p0 not to be planned"
        )
        if share == 0.05:
            wait_until(lambda: reader.popen.poll() is not None, "too much in quarantine")
            assert "READs that may still land" in reader.logged()
            cluster.spawn("d0", "decode")
        else:
            assert reader.popen.poll() is None  # its own transport is as it was

        made.give_data(0)
        cluster.spawn("p0", "prefill")
        cluster.wait_ready("p0", "d0")
        assert cluster.epochs["p0"] != before["p0"]
        assert (cluster.epochs["d0"] == before["d0"]) == (share != 0.05)
        wait_until(lambda: hands_over(served), "a hand-over")


def test_an_owner_that_is_doubted_without_a_reason_stays(tmp_path: Path) -> None:
    """Control: a READ that fails for the reader's sake; the owner looks at itself, twice."""
    model_dir = make_checkpoint(tmp_path / "gemma3", "gemma3", window=WINDOW)
    cluster = Cluster(model_dir, tmp_path, OPTIONS, {"worker_silent_ms": SILENT_MS})
    with running(cluster, p0="prefill", d0="decode"):
        doubt_the_owner(ServedModel(cluster))


def doubt_the_owner(served: ServedModel) -> None:
    cluster, expected = served.cluster, served.prompt(150)
    before = dict(cluster.epochs)
    told = cluster.tell("p0", "hold checks")
    cluster.tell("d0", "fail 0 9")  # the last block, which every group needs
    assert_exact(served.ask(expected, "failed"), expected)
    cluster.wait_told("p0", "held checks", told)
    cluster.tell("d0", "intact")
    told = cluster.tell("p0", "pass checks 1")
    cluster.wait_told("p0", "held checks", told)
    cluster.tell("p0", "pass checks")
    # The router leaves the pair alone for as long as a worker may be silent.
    wait_until(lambda: hands_over(served), "a hand-over")
    assert cluster.epochs == before


def hands_over(served: ServedModel) -> bool:
    """Whether one more request is exact and handed over at once; the pair may rest."""
    for name in served.cluster.workers:
        served.cluster.tell(name, "forget")
    expected, request_id = served.prompt(100), served.new_id()
    assert_exact(served.ask(expected, request_id), expected)
    (first, *more) = served.cluster.record(request_id)["generations"]
    return not more and not first["local"]
