"""What the page about queues says of requests that wait, and of those that have waited."""

from dataclasses import replace

from disagg.messages.identity import Incarnation
from disagg.messages.reports import PrefillTimes
from disagg.router.queue_pages import LATELY_MS, waits
from disagg.routing.record import GenerationRecord, RequestRecord

NOW_MS = 100_000
P, D = Incarnation("p", "1"), Incarnation("d", "1")
GENERATION = GenerationRecord(
    generation=1, started_ms=91_000, prefill=P, decode=D, prefill_role="prefill",
    decode_role="decode", reason="", num_prompt_tokens=4, expected_hit_tokens=0, hit_tokens=0,
    computed_tokens=4, pulled_tokens=0, uncached_common_tokens=0, prefill_ms=95_000,
    prefill_times=PrefillTimes(700, 10, 20), transfer=None, pull=None, num_tokens=1, cause="",
)  # fmt: skip
STARTED = RequestRecord(
    request_id="r", revision="", num_prompt_tokens=4, seed=0, received_ms=90_000,
    submitted_ms=90_100, first_token_ms=95_000, finished_ms=None, num_tokens=1,
    generations=(GENERATION,), outcome="", error="",
)  # fmt: skip
WAITING = replace(STARTED, first_token_ms=None, num_tokens=0, generations=())


def found(
    *records: RequestRecord, full: frozenset[str] = frozenset()
) -> list[tuple[str, int, int]]:
    return [
        (one["role"], one["age_ms"], one["waited_ms"]) for one in waits([*records], full, NOW_MS)
    ]


def test_who_waits_at_the_router_waits_for_every_role_without_room() -> None:
    assert found(WAITING, full=frozenset({"decode"})) == [("decode", 10_000, 9_900)]
    both = frozenset({"decode", "prefill"})
    assert [role for role, _, _ in found(WAITING, full=both)] == ["decode", "prefill"]
    assert found(WAITING) == []
    ended = replace(WAITING, finished_ms=99_000, outcome="cancelled")
    assert found(ended, full=both) == []


def test_who_has_begun_says_how_long_it_waited_at_its_worker() -> None:
    assert found(STARTED, full=frozenset({"decode"})) == [("prefill", 10_000, 700)]
    assert found(replace(STARTED, first_token_ms=NOW_MS - LATELY_MS - 1)) == []
    unknown = replace(STARTED, generations=(replace(GENERATION, prefill_times=None),))
    assert found(unknown) == []
