"""The next turn of a conversation, over HTTP: its history is pulled from the decode worker."""

import pytest

from tests.process.harness import wait_until
from tests.process.served_model import (
    Expected,
    ServedModel,
    assert_exact,
    handed_over,
    is_reported,
)

pytestmark = pytest.mark.timeout(600)

FIRST, ANSWER, TURN = 150, 60, 20
BOUNDARY = 208
"""The last block end of which d0 has computed every token: the last one was never an input."""
COMMITTED = 'disagg_routing_prefix_pulls_total{model_name="tiny",outcome="committed"}'


def next_turn(served: ServedModel) -> Expected:
    """Serve a first turn, let p0 forget it, and return the second one."""
    first = served.prompt(FIRST, ANSWER)
    served.serve(first)
    served.cluster.tell("p0", "forget")
    second = served.prompt(FIRST + ANSWER + TURN, 6, start=first.whole)
    known = {"p0": 0, "d0": BOUNDARY}
    wait_until(lambda: served.cluster.usable_tokens(second.prompt) == known, "both to be known")
    return second


def test_history_is_pulled_from_the_worker_that_decoded_it(gemma3: ServedModel) -> None:
    cluster = gemma3.cluster
    second = next_turn(gemma3)
    committed = cluster.metric(COMMITTED)
    completion = gemma3.ask(second, "second")
    assert_exact(completion, second)
    wait_until(lambda: is_reported(cluster.record("second")), "the prefill's report")
    record = cluster.record("second")
    generation = handed_over(record)
    pull = generation["pull"]
    assert (pull["owner"]["worker_id"], pull["kind"], pull["failed"]) == ("d0", "prefix", "")
    assert pull["num_tokens"] == generation["pulled_tokens"] == BOUNDARY
    assert generation["hit_tokens"] == 0
    assert f"pulls {BOUNDARY} more tokens of the prefix from d0" in generation["reason"]
    *windows, full = pull["groups"]
    assert full["block_map"] == "p" * 13
    assert {group["block_map"] for group in windows} == {".............pp"[2:]}
    # And back: d0 lacks only what p0 has computed since, and the windows at the prompt's end.
    *_, full = generation["transfer"]["groups"]
    assert full["block_map"] == "h" * 13 + "pp"
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    assert (
        completion.usage.prompt_tokens_details.cached_tokens == BOUNDARY == record["cached_tokens"]
    )
    assert cluster.metric(COMMITTED) == committed + 1
    assert cluster.counters("p0")["prefix_pulls_committed"] >= 1


def test_what_was_pulled_is_used(gemma3: ServedModel) -> None:
    """Control: one corrupted block of the pulled history changes the answer."""
    second = next_turn(gemma3)
    told = gemma3.cluster.tell("p0", "corrupt 5")
    completion = gemma3.ask(second)
    gemma3.cluster.wait_told("p0", "corrupted 5 ", told)
    with pytest.raises(AssertionError):
        assert_exact(completion, second)
