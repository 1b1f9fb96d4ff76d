"""Tables in a terminal that is narrower than they are."""

import os
import pty
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def in_a_terminal(columns: int, *arguments: str) -> str:
    """What a command writes to a terminal of so many columns."""
    ours, its = pty.openpty()
    kept = {key: value for key, value in os.environ.items() if not key.startswith("DISAGG_")}
    with subprocess.Popen(
        [sys.executable, "-m", "disagg.commands", *arguments],
        env={**kept, "PYTHONPATH": str(ROOT), "COLUMNS": str(columns), "TERM": "dumb"},
        stdin=subprocess.DEVNULL,
        stdout=its,
    ) as process:
        os.close(its)
        written = bytearray()
        try:
            while more := os.read(ours, 1 << 16):
                written += more
        except OSError:
            pass  # how the end of a terminal reads
        assert process.wait(60) == 0
    os.close(ours)
    return written.decode()


def test_no_setting_is_cut_off(tmp_path: Path) -> None:
    """Not its name, its value or where it came from: all that `disagg config` is there for."""
    folder = "/srv/models/" + "gemma-3-27b-instruct/" * 12 + "weights"
    file = tmp_path / "settings-of-this-fleet.yaml"
    file.write_text(f"model:\n  dir: {folder}\n  name: gemma\n")
    shown = in_a_terminal(60, "config", "--config", str(file))
    assert "scheduling.num_speculative_tokens" in shown
    (line,) = [line for line in shown.splitlines() if " model.name " in line]
    assert f"file:{file}:3" in line
    assert "weights" in shown
    assert "\u2026" not in shown
