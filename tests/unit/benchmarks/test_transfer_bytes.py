"""What a hand-over pulls is the least that attention can do with, for real models' shapes."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.transfer_bytes import LENGTHS, SHAPES, HandOver, document, figures, hand_overs

DOCUMENT = Path(__file__).parents[3] / "docs" / "benchmarks.md"


@pytest.fixture(scope="module")
def results() -> list[HandOver]:
    return list(hand_overs(LENGTHS))


def test_exactly_the_needed_blocks_are_pulled(results: list[HandOver]) -> None:
    assert {one.shape for one in results} == set(SHAPES)
    assert [one.name for one in results if one.pulled_blocks != one.needed_blocks] == []


def test_a_chunked_local_model_moves_at_least_69_percent_less(results: list[HandOver]) -> None:
    (scout,) = (one for one in results if one.name == "transfer_bytes/llama-4-scout/100000")
    assert scout.pulled_bytes <= (1 - 0.69) * scout.all_bytes
    assert all(figure["ok"] for figure in figures(scout))


def test_one_block_too_many_misses_the_target(results: list[HandOver]) -> None:
    more = replace(results[0], pulled_blocks=results[0].pulled_blocks + 1)
    assert not all(figure["ok"] for figure in figures(more))
    everything = replace(results[4], pulled_bytes=results[4].all_bytes)
    assert not all(figure["ok"] for figure in figures(everything))


def test_the_documents_table_is_this_one(results: list[HandOver]) -> None:
    assert document(results) in DOCUMENT.read_text(), (
        "docs/benchmarks.md should contain the output of "
        "python -m benchmarks.transfer_bytes --table"
    )
