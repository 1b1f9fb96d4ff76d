"""The examples of `disagg/testing/README.md` run."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[3] / "disagg" / "testing" / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_examples_run(number: int) -> None:
    exec(compile(EXAMPLES[number], f"{README}, example {number + 1}", "exec"), {})


def test_there_is_one_of_each() -> None:
    assert ["ScriptedWorker(" in text for text in EXAMPLES] == [True, False]
    assert ["Simulation(" in text for text in EXAMPLES] == [False, True]
