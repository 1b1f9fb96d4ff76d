"""One span per transfer leaves the reader's process, whatever became of the transfer."""

import json
from functools import partial
from typing import Any

import pytest

from tests.process.harness import wait_until
from tests.process.served_model import ServedModel, assert_exact, is_exact

pytestmark = pytest.mark.timeout(600)


def spans(served: ServedModel, request_id: str) -> list[dict[str, Any]]:
    """Of a request, as the decode worker exported them."""
    start = '{"name": "kv.transfer"'
    lines = [line for line in served.cluster.workers["d0"].lines if line.startswith(start)]
    found = [json.loads(line) for line in lines]
    return [span for span in found if span["attributes"]["disagg.request_id"] == request_id]


def wait_spans(served: ServedModel, request_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = wait_until(partial(spans, served, request_id), "its span")
    return found


def test_a_committed_transfer_says_what_the_record_says(gemma3: ServedModel) -> None:
    expected = gemma3.prompt(150)
    assert_exact(gemma3.ask(expected, "traced"), expected)
    (span,) = wait_spans(gemma3, "traced")
    attributes = span["attributes"]
    (generation,) = gemma3.cluster.record("traced")["generations"]
    groups = generation["transfer"]["groups"]
    assert attributes["disagg.outcome"] == "committed"
    assert attributes["disagg.kind"] == "handover"
    assert attributes["disagg.owner"] == "p0"
    assert attributes["disagg.lease_id"] > 0
    assert attributes["disagg.group_kinds"] == [group["kind"] for group in groups]
    assert attributes["disagg.group_num_blocks"] == [group["pulled_blocks"] for group in groups]
    assert attributes["disagg.num_bytes"] == sum(group["pulled_bytes"] for group in groups)
    assert attributes["disagg.num_reads"] == generation["transfer"]["num_reads"]
    assert span["status"]["status_code"] == "UNSET"
    assert span["resource"]["attributes"]["service.instance.id"].startswith("d0:")


def test_a_transfer_whose_lease_is_gone_is_an_error(gemma3: ServedModel) -> None:
    cluster, expected = gemma3.cluster, gemma3.prompt(150, 7)
    told = cluster.tell("d0", "hold dones")
    answer = gemma3.ask_later(expected, "untraced")
    cluster.wait_told("d0", "held dones", told)
    assert spans(gemma3, "untraced") == []
    cluster.tell("p0", "end_leases")
    cluster.tell("d0", "pass dones")
    assert is_exact(answer.result, expected)
    first = wait_spans(gemma3, "untraced")[0]
    # Whoever speaks first: the answer to the commit, the other worker's end, or the router, to
    # which that was told too, and which plans anew.
    spoken = ("commit_refused", "lease_dead", "peer_ended", "cancelled")
    assert first["attributes"]["disagg.outcome"] in spoken
    assert first["status"]["status_code"] == "ERROR"
