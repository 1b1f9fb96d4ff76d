"""docs/operations.md: alerts and thresholds are the rules'; tests and figures it names exist."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs/operations.md").read_text()
RULES: list[dict[str, Any]] = yaml.safe_load(
    (ROOT / "k8s/components/monitoring/alerts.yaml").read_text()
)["groups"][0]["rules"]
ROW = re.compile(r"^\| `(Disagg\w+)` \| ([^|]+) \|", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows(text: str) -> dict[str, str]:
    """What the table says of when each alert fires."""
    found = ROW.findall(text)
    assert len(found) == len(dict(found))
    return dict(found)


def faults(text: str) -> list[str]:
    """Alerts that only one side has, and thresholds and times that the table has otherwise."""
    told = rows(text)
    names = {rule["alert"] for rule in RULES}
    wrong = [f"{name}: on one side only" for name in sorted(names ^ told.keys())]
    for rule in RULES:
        row = told.get(rule["alert"], "")
        numbers = re.findall(r"> ([\d.]+)\s*$", rule["expr"].strip())
        wanted = [*numbers, *([f"for {rule['for']}"] if "for" in rule else ["15 minutes"])]
        wrong += [
            f"{rule['alert']}: {one}"
            for one in wanted
            if row and not re.search(rf"(?<![\d.]){re.escape(one)}(?![\d.])", row)
        ]
    return wrong


def test_alerts_are_those_of_the_rules_with_their_thresholds() -> None:
    assert faults(TEXT) == []
    named = set(re.findall(r"\bDisagg[A-Z]\w+", TEXT))
    assert named == {rule["alert"] for rule in RULES}


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("`DisaggNoDecode` |", "`DisaggNoDecoder` |", "DisaggNoDecode: on one side only"),
        ("more than 32 requests wait", "more than 64 requests wait", "DisaggRequestsWait: 32"),
        ("is beyond 10 s, for 10m", "is beyond 10 s, for 5m", "DisaggFirstTokenLate: for 10m"),
    ],
)
def test_a_difference_is_seen(before: str, after: str, fault: str) -> None:
    assert before in TEXT
    assert fault in faults(TEXT.replace(before, after))


def test_every_test_it_names_is_there() -> None:
    found = TEST.findall(TEXT)
    assert len(found) > 20
    for path, name in found:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), name


def test_the_example_is_what_the_plan_says(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests/data/model_configs/gemma-3-27b.json", tmp_path / "config.json")
    options = ["--model", str(tmp_path), "--memory", "40GiB", "--context", "32768"]
    assert "--memory 40GiB --context 32768" in TEXT
    said = subprocess.run(
        [sys.executable, "-m", "disagg.commands", "plan", *options],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=120,
    ).stdout  # fmt: skip
    for figure in ("32,768 blocks of 1.25 MiB", "81,920", "65", "2,048", "2.976 GiB", "15.5 GiB"):
        assert figure in said
        assert all(word in TEXT for word in figure.split(" blocks of "))
    assert re.search(r"this plan\s+\S+\s+13 ", said)
    assert re.search(r"all layers full\s+\S+\s+2 ", said)
    bytes_table = (ROOT / "docs/benchmarks/hand-overs.md").read_text()
    for row in ("| gemma-3-27b | 32,000 | 0 |", "| gemma-3-27b | 32,000 | 16,000 |"):
        (line,) = [line for line in bytes_table.splitlines() if line.startswith(row)]
        assert f"{line.split('|')[6].strip()} MB" in TEXT


def test_memory_and_start_are_as_they_were_measured() -> None:
    section = TEXT.partition("## Memory and start")[2].partition("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(table) == 4
    measured = (ROOT / "docs/benchmarks/router.md").read_text().partition("## Start and memory")[2]
    for line in table:
        process, *told = [cell.strip() for cell in line.strip("|").split("|")]
        (row,) = [one for one in measured.splitlines() if one.startswith(f"| {process} |")]
        seconds, _, rss, pss = [cell.strip() for cell in row.strip("|").split("|")][1:]
        assert told == [re.sub(r" \(aim: \d+\)", "", cell) for cell in (seconds, rss, pss)]
