"""READs and messages that `disagg calibrate` measures, interrupted."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
from disagg.commands.measured_links import measure_links
from disagg.commands.signals import exit_on_signals

if __name__ == "__main__":
    exit_on_signals()
    print("begins", flush=True)
    say = lambda text: print(text, flush=True)
    measure_links(4096, "cpu", 1 << 20, 1000, say)
"""
"""It would take minutes."""


@pytest.mark.parametrize("until", ["begins", "READs between two processes"])
@pytest.mark.parametrize(
    ("number", "to_all"),
    [(signal.SIGINT, True), (signal.SIGTERM, False)],
    ids=["by a terminal", "by its id"],
)
def test_an_interruption_is_one_line(
    number: signal.Signals, to_all: bool, until: str, tmp_path: Path
) -> None:
    """The other process wrote a traceback of its own behind it."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, str(file)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=PIPE,
        stderr=PIPE,
        text=True,
        start_new_session=True,
    ) as run:
        assert run.stdout is not None
        while run.stdout.readline().strip() != until:
            assert run.poll() is None
        if until == "begins":
            with pytest.raises(subprocess.TimeoutExpired):
                run.wait(1.0)  # the other process is importing by now
        (os.killpg if to_all else os.kill)(run.pid, number)
        _, said = run.communicate(timeout=60)  # both have ended: they have the same file
    assert (run.returncode, said) == (128 + number, "disagg: interrupted\n")
