"""What a hand-over pulls is the least that attention can do with, for real models' shapes."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.transfer_bytes.figures import LENGTHS, document, figures, hand_overs
from benchmarks.transfer_bytes.hand_over import HandOver, hand_over
from benchmarks.transfer_bytes.shapes import SHAPES
from tests.drawn_tables import check_drawn

DOCUMENT = Path(__file__).parents[3] / "docs" / "benchmarks" / "hand-overs.md"


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


def test_what_is_cached_is_moved_by_nobody(results: list[HandOver]) -> None:
    """A peer with a prefix cache moves as much as for a prompt of what is not cached."""
    cached = [one for one in results if one.num_cached]
    assert {one.shape for one in cached} == {shape for shape in SHAPES if shape.full_every}
    for one in cached:
        rest = hand_over(one.shape, one.num_tokens - one.num_cached)
        assert one.uncached_bytes == rest.all_bytes == one.all_bytes // 2
    (scout,) = (one for one in cached if one.name.endswith("llama-4-scout/32000/cached-16000"))
    compared = {str(line["name"]).rpartition("/")[2]: line["ratio"] for line in figures(scout)}
    assert compared == {"blocks": 1, "bytes": 1, "all_layers": 1.6722, "prefix_cache": 2}


def test_one_block_too_many_misses_the_target(results: list[HandOver]) -> None:
    more = replace(results[0], pulled_blocks=results[0].pulled_blocks + 1)
    assert not all(figure["ok"] for figure in figures(more))
    everything = replace(results[4], pulled_bytes=results[4].uncached_bytes)
    assert not all(figure["ok"] for figure in figures(everything))


def test_the_documents_table_is_this_one(results: list[HandOver]) -> None:
    check_drawn(DOCUMENT, "transfer_bytes", document(results))
