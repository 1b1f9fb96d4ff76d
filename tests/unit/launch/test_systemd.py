"""`disagg.service`: systemd accepts it, it fits the settings, its command exists."""

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from disagg.config import Settings
from tests.unit.launch.commands import parse_command

ROOT = Path(__file__).parents[3]
UNIT = ROOT / "disagg.service"
HERE = {"/opt/disagg/bin/disagg": "/bin/true", "User=disagg": "User=root"}
"""What this machine need not have, and what it has."""


def verify(folder: Path, text: str) -> str:
    """What systemd has to say of a unit."""
    for theirs, ours in HERE.items():
        assert theirs in text
        text = text.replace(theirs, ours)
    copy = folder / UNIT.name
    copy.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(copy)],
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if UNIT.name in line]
    return "\n".join(said)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit_and_sees_what_is_wrong(tmp_path: Path) -> None:
    text = UNIT.read_text()
    assert verify(tmp_path, text) == ""
    for right, wrong in (("KillMode=mixed", "KillMode=some"), ("RestartSec=", "RestartSeconds=")):
        assert right in text
        assert verify(tmp_path, text.replace(right, wrong)) != ""


def read() -> dict[str, dict[str, list[str]]]:
    """Values by section and key; a key may come several times."""
    parser = configparser.ConfigParser(interpolation=None, strict=False, dict_type=_Lists)  # type: ignore[arg-type]
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return {
        name: {key: value.split("\n") for key, value in parser.items(name)}
        for name in parser.sections()
    }


class _Lists(dict[str, object]):
    """Keeps every value of a key, as lines."""

    def __setitem__(self, key: str, value: object) -> None:
        if isinstance(value, list) and isinstance(found := self.get(key), list):
            found.extend(value)
        else:
            super().__setitem__(key, value)


def test_the_command_exists_and_is_always_started_again() -> None:
    service = read()["Service"]
    (start,) = service["ExecStart"]
    program, *arguments = shlex.split(start)
    assert program.endswith("/bin/disagg")
    parse_command(arguments)
    assert arguments[0] == "serve"
    assert service["Restart"] == ["always"]
    assert read()["Unit"]["StartLimitIntervalSec"] == ["0"]
    # A signal to all at once would end the router's children before it has drained.
    assert service["KillMode"] == ["mixed"]


def test_there_is_time_to_drain_before_it_is_killed() -> None:
    settings = Settings()
    (bound_s,) = map(float, read()["Service"]["TimeoutStopSec"])
    drain_s = settings.router.drain_timeout_ms / 1000
    assert bound_s > drain_s + 2 * settings.cluster.stop_timeout_s


def test_ray_is_told_the_same_as_by_ray_up() -> None:
    line = (ROOT / "cluster.yaml").read_text()
    for variable in read()["Service"]["Environment"]:
        if variable.startswith("RAY_"):
            assert f" {variable} " in line, variable
