"""A process that stands still under load is noticed at once; one that is only slow is not."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.process.harness import Cluster, running, wait_until
from tests.process.timed_load import (
    NUM_STREAMS,
    NUM_TOKENS,
    REQUEST_S,
    Expected,
    Load,
    clear_prompts,
    load,
)

pytestmark = pytest.mark.timeout(1200)

PAUSE_S = 8.0
KNOWN_S = 6.0
"""Under load; so long it takes until the router knows a worker's rhythm."""
SOAK_S = float(os.environ.get("DISAGG_SILENCE_SOAK_S") or 60)
NUM_BUSY = 20
"""Processes that compute beside the workers; the machine's load is more than that."""
LOST = 'disagg_routing_workers_lost_total{cause="silent",model_name="tiny"}'


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("silence")
    model_dir = make_checkpoint(folder / "gemma3", "gemma3")
    made = Cluster(model_dir, folder, {"max_step_tokens": 96, "num_blocks": 512})
    with running(made, p0="prefill", d0="decode", d1="decode"):
        yield made


@pytest.fixture(scope="module")
def prompts(cluster: Cluster) -> list[Expected]:
    return clear_prompts(cluster.model_dir)


def pause(cluster: Cluster, under: Load, capsys: pytest.CaptureFixture[str]) -> None:
    """Stop a worker that has streams: they go on elsewhere before it does."""
    wait_until(lambda: cluster.known()["d0"]["num_live"] > 0, "streams at d0", REQUEST_S)
    lost = cluster.metric(LOST)
    began_s = time.monotonic()
    running = [one for one in list(under.sent) if not one.ended_s]
    cluster.workers["d0"].stop()
    try:
        wait_until(lambda: cluster.metric(LOST) > lost, "the silence to be noticed", REQUEST_S)
        noticed_s = time.monotonic() - began_s
        wait_until(
            lambda: all(one.ended_s or one.token_s[-1:] > [began_s] for one in running),
            "every stream to go on",
            REQUEST_S,
        )
        wait_until(lambda: time.monotonic() > began_s + PAUSE_S, "the rest of the fault")
    finally:
        cluster.workers["d0"].resume()
    ended_s = time.monotonic()
    wait_until(lambda: cluster.known().get("d0", {}).get("ready"), "it to be back", REQUEST_S)
    wait_until(lambda: under.num_tokens(ended_s) > NUM_STREAMS * NUM_TOKENS, "load", REQUEST_S)
    stood = [
        one.stood_s(began_s)
        for one in list(under.sent)
        if one.ended_s > began_s and one.began_s < ended_s
    ]
    with capsys.disabled():
        print(
            f"\na worker stands still for {PAUSE_S:g} s at load {os.getloadavg()[0]:.0f}: noticed"
            f" after {noticed_s:.1f} s, its streams went on after {max(stood):.1f} s at most"
        )


def test_streams_of_a_worker_that_stands_still_go_on_elsewhere(
    cluster: Cluster, prompts: list[Expected], capsys: pytest.CaptureFixture[str]
) -> None:
    with load([cluster.url], prompts) as under:
        time.sleep(KNOWN_S)
        pause(cluster, under, capsys)
    assert not [one.error for one in under.sent if one.error]


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 3600)
def test_nobody_is_lost_who_is_only_slow(
    cluster: Cluster, prompts: list[Expected], capsys: pytest.CaptureFixture[str]
) -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(NUM_BUSY)]
    try:
        with load([cluster.url], prompts) as under:
            lost, began_s = cluster.metric(LOST), time.monotonic()
            loads = []
            while time.monotonic() < began_s + SOAK_S:
                time.sleep(5)
                loads.append(os.getloadavg()[0])
            with capsys.disabled():
                print(
                    f"\n{SOAK_S:g} s at load {min(loads):.0f} to {max(loads):.0f}:"
                    f" {len(under.sent)} requests, {cluster.metric(LOST) - lost:g} workers lost"
                )
            assert cluster.metric(LOST) == lost
            pause(cluster, under, capsys)  # the control: who does stand still is noticed here too
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert not [one.error for one in under.sent if one.error]
