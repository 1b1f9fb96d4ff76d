"""`disagg doctor` over real workers: hand-overs between all pairs, and what they took."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from disagg.commands.finding import Level
from disagg.commands.status_view import fetch
from disagg.commands.transfer_findings import Ports, measure_pairs
from tests.checkpoints import make_checkpoint
from tests.process.harness import ROOT, Cluster, running
from tests.process.served_model import WINDOW, ServedModel

pytestmark = pytest.mark.timeout(900)

BOUND_S = 120


def test_hand_overs_are_measured_where_they_work_and_named_where_not(gemma3: ServedModel) -> None:
    cluster = gemma3.cluster
    body = fetch(cluster.admin_url, BOUND_S)
    ports = Ports(cluster.admin_url, cluster.url, BOUND_S)
    (found,) = measure_pairs(body, ports, 64)
    assert (found.level, found.subject) == (Level.OK, "p0 → d0")
    shown = re.fullmatch(r"(\d+) KiB in (\d+) READs, \d+ ms: (over )?[\d.]+ MB/s", found.seen)
    assert shown
    assert int(shown[1]) > 0
    assert int(shown[2]) > 0
    cluster.wait_quiescent()


def test_pairs_are_measured_where_the_policy_would_hand_nothing_over(tmp_path: Path) -> None:
    """An idle fleet may serve short prompts faster by one worker: the default finds that out."""
    directory = make_checkpoint(tmp_path / "gemma3", "gemma3", window=WINDOW)
    cluster = Cluster(directory, tmp_path, {}, {"policy": "local"})
    with running(cluster, p0="prefill", d0="decode", d1="decode"):
        ports = Ports(cluster.admin_url, cluster.url, BOUND_S)
        found = list(measure_pairs(fetch(cluster.admin_url, BOUND_S), ports, 64))
        assert [one.subject for one in found] == ["p0 → d0", "p0 → d1"]
        assert {one.level for one in found} == {Level.OK}, found
        served = ServedModel(cluster)
        prompt = served.prompt(40, 4)
        served.ask(prompt, "control")
        (only,) = cluster.record("control")["generations"]
        assert only["prefill"] == only["decode"], "control: others are not handed over"


def test_the_command_says_all_of_it_and_its_exit_code(gemma3: ServedModel) -> None:
    cluster = gemma3.cluster
    command = [sys.executable, "-m", "disagg.commands", "doctor", "--json"]
    command += ["--url", cluster.admin_url, "--transfers", "--http-url", cluster.url]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    findings = json.loads(done.stdout)["findings"]
    faults = [one for one in findings if one["level"] == "fault"]
    assert done.returncode == int(bool(faults)), done.stderr
    by_subject = {one["subject"]: one["level"] for one in findings}
    for subject in ("python", "packages", "nixl", "router", "worker p0", "p0 → d0"):
        assert by_subject[subject] == "ok", findings
    assert {"shared memory", "file descriptors", "rdma", "gpu", "ray"} <= by_subject.keys()
    cluster.wait_quiescent()
