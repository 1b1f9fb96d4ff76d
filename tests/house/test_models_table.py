"""docs/models.md says what the code and the tests say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
CHANGES = ("| MistralForCausalLM |", "| `quantization_config` |", "`test-slow` |")


def test_the_page_is_up_to_date_and_another_one_is_not(tmp_path: Path) -> None:
    text = PAGE.read_text()
    others = []
    for number, said in enumerate(CHANGES):
        assert said in text
        others.append(tmp_path / f"changed-{number}.md")
        others[-1].write_text(text.replace(said, "| else |", 1))
    # A process of its own: pytest cannot collect within a collection of itself.
    command = [
        sys.executable,
        "-m",
        "tests.house.models_page",
        "--check",
        *map(str, (PAGE, *others)),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    outdated = [line.partition(" is outdated")[0] for line in done.stderr.splitlines()]
    assert outdated == [str(other) for other in others], done.stderr
    assert done.returncode == 1
