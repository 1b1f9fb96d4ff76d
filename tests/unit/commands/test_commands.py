"""The `disagg` command as a user meets it: a process with an exit code and two outputs."""

import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
from typer.main import get_group
from typer.testing import CliRunner

from disagg.commands.main import app
from disagg.workers.tiers.disk_store import DiskStore

ROOT = Path(__file__).parents[3]


def disagg(
    *arguments: str, cwd: Path, stdout: IO[str] | int = subprocess.PIPE, **environ: str
) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("DISAGG_")}
    return subprocess.run(
        [sys.executable, "-m", "disagg.commands", *arguments],
        cwd=cwd,
        env={**kept, "PYTHONPATH": str(ROOT), **environ},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )


def test_help_shows_commands_and_an_example(tmp_path: Path) -> None:
    run = disagg("--help", cwd=tmp_path)
    assert run.returncode == 0
    for word in ("serve", "router", "workers", "config", "disagg serve --model ./my-model"):
        assert word in run.stdout
    assert CliRunner().invoke(app, ["keys", "create", "-h"]).exit_code == 0


@pytest.mark.parametrize("columns", [80, 120])
def test_help_is_broken_where_the_terminal_ends(columns: int) -> None:
    """Nowhere else in a paragraph, and no example is broken at all."""
    width = columns - 2
    commands = [
        [name, *more]
        for name, command in get_group(app).commands.items()
        for more in ([[one] for one in getattr(command, "commands", ())] or [[]])
    ]
    assert len(commands) > 20
    for command in commands:
        terminal = {"COLUMNS": str(columns), "NO_COLOR": "1"}
        run = CliRunner().invoke(app, [*command, "--help"], env=terminal)
        assert run.exit_code == 0, (command, run.output)
        text = run.output.partition("Usage:")[2].partition("\n")[2].partition("\u256d")[0]
        lines = [line.removeprefix(" ").rstrip() for line in text.splitlines()]
        for line, after in itertools.pairwise(lines):
            if line.startswith("  "):
                assert not after, (command, line)
            elif line and after:
                assert len(f"{line} {after.split()[0]}") > width, (command, line)


def test_version(tmp_path: Path) -> None:
    run = disagg("--version", cwd=tmp_path)
    assert (run.returncode, run.stdout) == (0, "0.1.0\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve"], "disagg: model.dir: which checkpoint? (--model DIR)\n"),
        (["workers", "--set", "router.grpc_port=x"], "disagg: router.grpc_port: should be a valid"),
        (["serve", "--model", "nowhere"], "disagg: model.dir: nowhere is not a checkpoint direct"),
        (["serve", "--model", 5_000 * "m"], "mmm is not a checkpoint directory"),
        (["serve", "--set", "router.http_prt=1"], "(did you mean router.http_port?) [flag:--set"),
        (["serve", "--set", "nonsense"], "disagg: --set nonsense: expected SECTION.KEY=VALUE"),
        (["serve", "--prefill", "-1"], "cluster.num_prefill: should be greater than or equal to 0"),
        (["serve", "--config", "none.yaml"], "disagg: none.yaml: No such file or directory\n"),
        (["router"], "disagg: model.dir: which checkpoint?"),
    ],
)
def test_a_users_error_is_one_text_and_exit_code_2(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "keep").write_text("x")
    run = disagg(*arguments, cwd=tmp_path)
    assert run.returncode == 2
    assert said in run.stderr
    assert "Traceback" not in run.stderr
    assert os.listdir(tmp_path) == ["keep"]


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("adapter_config.json", "a PEFT adapter without its model"),
        ("params.json", "a checkpoint in Mistral's own format alone"),
    ],
)
def test_what_is_no_checkpoint_yet_is_named(tmp_path: Path, file: str, said: str) -> None:
    (tmp_path / file).write_text("{}")
    run = disagg("serve", "--model", ".", cwd=tmp_path)
    assert run.returncode == 2
    assert f"model.dir: . holds {said}" in run.stderr


@pytest.mark.parametrize("arguments", ["config", "--version", "--help"])
def test_output_that_finds_no_room_is_told_in_one_line(arguments: str, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        run = disagg(*arguments.split(), cwd=tmp_path, stdout=full)
    assert (run.returncode, run.stderr) == (
        1,
        "disagg: standard output: No space left on device\n",
    )


def test_a_reader_that_leaves_and_no_output_at_all_are_no_traceback(tmp_path: Path) -> None:
    for shell, code in (('"$@" | true; exit "${PIPESTATUS[0]}"', (0, 1)), ('"$@" >&-', (0,))):
        command = [sys.executable, "-m", "disagg.commands", "config"]
        run = subprocess.run(
            ["bash", "-c", shell, "-", *command],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert run.returncode in code, (shell, run.stderr)
        assert run.stderr == "", shell


def test_config_tells_where_values_come_from(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("worker:\n  num_blocks: 7\ncluster:\n  hash_key: secret\n")
    arguments = ["config", "-c", "a.yaml", "--set", "router.http_port=9"]
    run = disagg(*arguments, "--json", cwd=tmp_path, DISAGG_CLUSTER__NUM_DECODE="3")
    values = json.loads(run.stdout)
    assert values["worker.num_blocks"] == {"value": 7, "source": "file:a.yaml:2"}
    assert values["router.http_port"] == {"value": 9, "source": "flag:--set router.http_port"}
    assert values["cluster.num_decode"] == {"value": 3, "source": "env:DISAGG_CLUSTER__NUM_DECODE"}
    assert values["router.host"] == {"value": "127.0.0.1", "source": "default"}
    assert values["cluster.hash_key"]["value"] == "***"
    table = disagg(*arguments, cwd=tmp_path).stdout
    assert "file:a.yaml:2" in table
    assert "secret" not in run.stdout + table


@pytest.mark.parametrize("name", ["[red]x", "[/x]", "a[b]"])
def test_config_shows_brackets_as_they_are(tmp_path: Path, name: str) -> None:
    run = disagg("config", "--set", f"model.name={name}", cwd=tmp_path)
    assert run.stderr == ""
    assert f'"{name}"' in run.stdout


@pytest.mark.parametrize("encoding", ["ascii", "ascii:surrogateescape"])  # a locale; that of "C"
def test_signs_that_a_terminal_lacks_are_no_traceback(tmp_path: Path, encoding: str) -> None:
    DiskStore(str(tmp_path / "a→b")).close()
    run = disagg("cache", "list", "a→b", cwd=tmp_path, PYTHONIOENCODING=encoding)
    assert (run.returncode, run.stderr) == (0, "")
    assert "a\\u2192b: 0 B" in run.stdout


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        run = disagg("serve", "--model", ".", "--http-port", port, cwd=tmp_path)
    assert run.returncode == 2
    assert f"router.http_port: 127.0.0.1:{port}: Address already in use" in run.stderr
