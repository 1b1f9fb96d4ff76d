"""`disagg explain`: what a record says of its plans."""

import io
from typing import Any

import pytest
from rich.console import Console

from disagg.commands import explain
from disagg.commands.explain import draw, explanation

ESTIMATE = {
    "ttft_ms": 41.0,
    "mean_tpot_ms": 7.5,
    "queue_ms": 1.0,
    "transfer_ms": 2.0,
    "prefill_ms": 33.0,
    "message_ms": 5.0,
    "handover_ms": 9.0,
    "tpot_ms": 7.0,
    "others_ms": 12.0,
    "neighbours": [{"num": 2, "tpot_ms": 8.0}],
    "num_bytes": 65536,
    "num_answer_tokens": 64,
}


def candidate(prefill: str, *, chosen: bool = False, known: bool = True) -> dict[str, Any]:
    return {
        "prefill": prefill,
        "decode": "d0",
        "pull": "",
        "found_tokens": 16,
        "estimate": ESTIMATE if known else None,
        "num_slos_missed": 0,
        "chosen": chosen,
    }


def record(**changes: Any) -> dict[str, Any]:
    plan = {
        "reason": "prefill on p0",
        "started_ms": 1_000,
        "estimate": ESTIMATE,
        "considered": [candidate("p0", chosen=True), candidate("p1", known=False)],
        "cause": "",
    }
    return {
        "request_id": "r",
        "received_ms": 950,
        "first_token_ms": 1_050,
        "finished_ms": 1_150,
        "num_tokens": 11,
        "generations": [plan],
        "outcome": "length",
        "error": "",
    } | changes


def test_an_id_that_is_no_text_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shell gives it of bytes that are no UTF-8; the router knows none of that name."""
    asked = []

    def call(url: str, path: str, *_: Any, **__: Any) -> dict[str, Any]:
        asked.append(path)
        return record()

    monkeypatch.setattr(explain, "call_router", call)
    explain.explain("a\udcff", "http://router", tenant="\udcff")
    assert asked == ["/v1/disagg/requests/a%3F?tenant=%3F"]


def text_of(body: dict[str, Any]) -> str:
    out = io.StringIO()
    Console(file=out, width=200, highlight=False).print(draw(body))
    return out.getvalue()


def test_candidates_choice_estimate_and_outcome_are_shown() -> None:
    lines = text_of(record()).splitlines()
    assert lines[0].startswith("plan 1: prefill on p0")
    (chosen,) = (line for line in lines if "→" in line)
    assert [part for part in chosen.split() if part in ("p0", "d0", "41.0", "64")] == [
        "p0",
        "d0",
        "41.0",
        "64",
    ]
    assert any("p1" in line and "not known" in line for line in lines)
    assert lines[-1].startswith("measured: TTFT 50.0 ms after the plan, TPOT 10.0 ms; length")


def test_a_request_that_never_began_and_one_that_lives() -> None:
    never = record(generations=[], first_token_ms=None, outcome="failed", error="SloError: late")
    assert "never planned" in text_of(never)
    assert text_of(never).splitlines()[-1] == "failed SloError: late"  # and no times
    shed = text_of(never | {"refused": [candidate("p0"), candidate("p1")]})
    assert "none of these would be in time" in shed
    assert [line.split()[0] for line in shed.splitlines()[2:4]] == ["p0", "p1"]
    assert "never planned" not in shed
    assert "it lives" in text_of(record(outcome="", finished_ms=None))


def test_programs_get_the_same() -> None:
    told = explanation(record())
    assert (told["ttft_ms"], told["tpot_ms"]) == (50, 10.0)
    assert [one["chosen"] for one in told["plans"][0]["considered"]] == [True, False]
