"""What the serve-bench benchmark takes from its client's result, and what it refuses."""

from typing import Any

import pytest

from benchmarks.serve_bench.__main__ import ONE, PAIR, TWO, VLLM, report, table
from benchmarks.serve_bench.client import (
    METRICS,
    STATISTICS,
    BenchError,
    Load,
    check_result,
    statistics_of,
)

LOAD = Load(200, 3, 0.5, 2)


def result(**changed: Any) -> dict[str, Any]:
    sound: dict[str, Any] = {
        "completed": 2,
        "failed": 0,
        "errors": ["", ""],
        "output_lens": [3, 3],
        "itls": [[0.1, 0.2], [0.1, 0.1]],
    }
    times = {f"{one}_{metric}_ms": 5.0 for one in STATISTICS for metric in METRICS}
    return sound | times | changed


def test_a_run_with_every_token_is_taken() -> None:
    check_result(result(), LOAD)
    assert set(statistics_of(result()).values()) == {5.0}
    assert len(statistics_of(result())) == 9


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"completed": 1, "failed": 1, "errors": ["", "Unauthorized"]}, "1 of 2 .*Unauthorized"),
        ({"output_lens": [3, 2]}, r"answers of \[2, 3\] tokens"),
        ({"itls": [[0.1, 0.2], [0.1]]}, r"\[1, 2\] times between 3 tokens"),
    ],
)
def test_another_run_is_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(BenchError, match=reason):
        check_result(result(**changed), LOAD)


def test_prompts_and_arrivals_follow_the_seed() -> None:
    first, again, other = LOAD.options(1), LOAD.options(1), LOAD.options(2)
    assert first == again != other
    assert {first[name] == other[name] for name in first.keys() - {"seed"}} == {True}


def test_the_table_has_a_row_per_system(capsys: pytest.CaptureFixture[str]) -> None:
    results = {
        (LOAD, name): [statistics_of(result(mean_ttft_ms=float(at)))]
        for at, name in enumerate((ONE, VLLM, PAIR, TWO), start=1)
    }
    lines = table((LOAD,), results).splitlines()
    cells = [line.split(" | ")[2] for line in lines[2:]]
    assert cells == ["1 / 5 / 5", "2 / 5 / 5", "3 / 5 / 5", "4 / 5 / 5"]
    report(LOAD, results, "native")
    figures = capsys.readouterr().out.splitlines()
    assert len(figures) == 27
    assert '"ours": 1.0, "peer": 2.0' in figures[0]
