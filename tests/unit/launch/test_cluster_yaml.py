"""`ray up`, here and on clouds: Ray's preparation and schema accept the files, commands exist."""

import contextlib
import copy
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from disagg.cluster.placement import role_resources
from disagg.config import Settings, read_settings
from disagg.tls.authority import NODE
from tests.unit.launch.commands import find_commands, parse_command

ROOT = Path(__file__).parents[3]
CLUSTER: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text())
CLOUDS: dict[str, dict[str, Any]] = {
    name: yaml.safe_load((ROOT / f"cluster-{name}.yaml").read_text()) for name in ("aws", "gcp")
}

# In a process of its own: Ray, once imported, cannot change how it authenticates.
VALIDATE = """
import json, sys
from ray.autoscaler._private.util import prepare_config, validate_config
said = []
for config in json.load(sys.stdin):
    try:
        validate_config(prepare_config(config))
        said.append("")
    except BaseException as error:
        said.append(f"{type(error).__name__}: {error}"[:300])
print("RESULT" + json.dumps(said))
"""


def validate(configs: list[dict[str, Any]]) -> list[str]:
    run = subprocess.run(
        [sys.executable, "-c", VALIDATE],
        input=json.dumps(configs),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    said: list[str] = json.loads(run.stdout.rpartition("RESULT")[2])
    return said


def broken(
    change: Callable[[dict[str, Any]], object], config: dict[str, Any] = CLUSTER
) -> dict[str, Any]:
    config = copy.deepcopy(config)
    change(config)
    return config


def test_ray_accepts_it_and_would_refuse_a_broken_one() -> None:
    good, *bad = validate(
        [
            CLUSTER,
            broken(lambda c: c.update(head_nodes={})),
            broken(lambda c: c["auth"].update(ssh_usr="ubuntu")),
            broken(lambda c: c.update(worker_start_ray_commands="ray start")),
            broken(lambda c: c["provider"].pop("head_ip")),
            broken(lambda c: c.pop("provider")),
        ]
    )
    assert good == ""
    assert all(bad), bad


@pytest.mark.parametrize("cloud", CLOUDS)
def test_ray_accepts_those_for_clouds_and_would_refuse_broken_ones(cloud: str) -> None:
    config = CLOUDS[cloud]
    good, *bad = validate(
        [
            config,
            broken(lambda c: c.update(nodes={}), config),
            broken(lambda c: c.update(head_node_type="heads"), config),
            broken(lambda c: c["available_node_types"]["prefill"].pop("node_config"), config),
            broken(lambda c: c["available_node_types"]["decode"].update(min_worker=1), config),
            broken(
                lambda c: c["available_node_types"]["decode"].update(resources={"GPU": "8"}), config
            ),
            broken(lambda c: c["available_node_types"]["decode"].update(min_workers=20), config),
        ]
    )
    assert good == ""
    assert all(bad), bad


@pytest.mark.parametrize("cloud", CLOUDS)
def test_clouds_run_the_same_commands_and_have_a_type_of_hosts_for_each_role(cloud: str) -> None:
    config = CLOUDS[cloud]
    for key in ("head_start_ray_commands", "worker_start_ray_commands", "setup_commands"):
        assert config[key] == CLUSTER[key]
    assert config["file_mounts"] == CLUSTER["file_mounts"]
    types = config["available_node_types"]
    assert types[config["head_node_type"]]["resources"] == {"CPU": 0, "GPU": 0}
    settings = Settings.model_validate({"cluster": {"role_resources": True}})
    for role in ("prefill", "decode"):
        (name,) = role_resources(settings, role)
        having = [kind for kind, each in types.items() if each["resources"].get(name)]
        assert having == [role]
        # One worker on each host, with all of its GPUs, as the comment above them sets it.
        assert types[role]["resources"] == types[role]["resources"] | {name: 1, "GPU": 8}
        text = (ROOT / f"cluster-{cloud}.yaml").read_text()
        assert "cluster.role_resources: true" in text
        assert "worker.tensor_parallel: 8" in text


def test_every_command_parses() -> None:
    lines = [*CLUSTER["head_start_ray_commands"], *CLUSTER["worker_start_ray_commands"]]
    commands = [command for line in lines for command in find_commands(line)]
    assert [command[0] for command in commands] == ["serve"]
    for command in commands:
        parse_command(command)


@pytest.mark.parametrize(
    "wrong", [["worker"], ["router", "--conf", "x"], ["workers", "--prefill", "two"]]
)
def test_a_wrong_command_is_seen(wrong: list[str]) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|valid integer"):
        parse_command(wrong)


def test_the_hosts_of_both_files_agree() -> None:
    settings = read_settings(ROOT / "disagg.yaml").settings
    head = CLUSTER["provider"]["head_ip"]
    assert settings.cluster.router_addresses == (f"{head}:{settings.router.grpc_port}",)
    assert settings.worker.host == "node"
    assert settings.cluster.num_hosts == 1 + len(CLUSTER["provider"]["worker_ips"])
    mounts = CLUSTER["file_mounts"]
    assert mounts["~/disagg.yaml"] == "./disagg.yaml"
    secrets = (settings.router.api_keys_file, settings.cluster.hash_key_file)
    assert {Path(mounts[path]).name for path in secrets} == {"disagg-keys.json", "disagg-hash-key"}
    assert mounts[settings.cluster.tls_directory] == f"./certificates/{NODE}"
    assert "0" not in (settings.worker.port, settings.worker.transfer_port)


def test_what_ray_has_to_be_told_is_said_wherever_it_starts() -> None:
    lines = [*CLUSTER["head_start_ray_commands"], *CLUSTER["worker_start_ray_commands"]]
    starts = [line for line in lines if "nohup" in line]
    assert len(starts) == 3
    assert all(" RAY_AUTH_MODE=token " in line for line in starts)
    raylets = [line for line in starts if "bin/ray start --block" in line]
    assert len(raylets) == 2
    assert all("RAY_worker_niceness=0" in line for line in raylets)
    # `ray up` sets it to 1 for all commands of the head, and 2 would leave a worker's host out.
    head = [line for line in starts if line in CLUSTER["head_start_ray_commands"]]
    assert len(head) == 2
    assert all(" RAY_enable_autoscaler_v2=0 " in line for line in head)


def test_another_ray_up_finds_what_runs_in_the_background() -> None:
    pattern = re.compile(
        r"(?:pgrep|pkill -HUP) -F (\S+) -f (?:['\"]([^'\"]+)['\"]|(\S+)) \|\| \{ .*nohup (.*)"
        r" & echo \$! > (\S+); .*\}"
    )
    for commands in (CLUSTER["head_start_ray_commands"], CLUSTER["worker_start_ray_commands"]):
        for line in (line for line in commands if "nohup" in line):
            found = pattern.fullmatch(line)
            assert found is not None, line
            looked_in, quoted, word, started, written = found.groups()
            assert looked_in == written
            assert (quoted or word) in started
        # Ray is stopped only where it does not run: its workers would end.
        (stop,) = [line for line in commands if "ray stop" in line]
        guard, _, _ = stop.partition(" || ")
        assert guard in [line.partition(" || ")[0] for line in commands if line != stop]


def start_loop(home: Path, name: str, program: str) -> "subprocess.Popen[bytes]":
    """The loop that the file starts on the head, with another program in the place of its own."""
    lines = CLUSTER["head_start_ray_commands"]
    (line,) = [each for each in lines if "sh -c" in each and f"bin/{name} " in each]
    script = home / "disagg-env" / "bin" / name
    script.parent.mkdir(parents=True)
    script.write_text(f"#!/bin/sh\necho $1 $$ >> {home}/starts\n{program}\n")
    script.chmod(0o755)
    loop = line[line.index("sh -c") : line.index(" > ~/disagg", line.index("monitor.py"))]
    return subprocess.Popen(["sh", "-c", f"exec {loop}"], env={**os.environ, "HOME": str(home)})


def starts(home: Path, num: int) -> list[int]:
    """The pids it has been started with, so many at least."""
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(FileNotFoundError):
            lines = (home / "starts").read_text().splitlines()
            if len(lines) >= num:
                assert all(line.startswith(("serve ", "start ")) for line in lines)
                return [int(line.split()[1]) for line in lines]
        assert time.monotonic() < deadline, "it is not started"
        time.sleep(0.05)


UNTIL_ASKED = "trap 'exit 0' TERM\nwhile :; do sleep 0.05; done"


def test_what_serves_is_started_again_when_it_is_killed_and_ends_when_it_is_asked_to(
    tmp_path: Path,
) -> None:
    loop = start_loop(tmp_path, "disagg", UNTIL_ASKED)
    (first,) = starts(tmp_path, 1)
    os.kill(first, signal.SIGKILL)
    _, second = starts(tmp_path, 2)
    assert (tmp_path / ".disagg.pid").read_text() == f"{second}\n"  # what the next `ray up` finds
    os.kill(second, signal.SIGTERM)
    assert loop.wait(60) == 0
    assert len(starts(tmp_path, 2)) == 2


@pytest.mark.parametrize("code", [0, 2, 143])
def test_what_serves_is_not_started_again_when_it_ends_by_itself(tmp_path: Path, code: int) -> None:
    assert start_loop(tmp_path, "disagg", f"exit {code}").wait(60) == 0
    assert len(starts(tmp_path, 1)) == 1


def test_ray_is_started_again_however_it_ended(tmp_path: Path) -> None:
    loop = start_loop(tmp_path, "ray", "[ $(wc -l < ~/starts) -lt 3 ] && exit 1\n" + UNTIL_ASKED)
    *_, last = starts(tmp_path, 3)
    os.kill(last, signal.SIGKILL)
    assert len(starts(tmp_path, 4)) == 4
    loop.terminate()
    loop.wait(60)


@pytest.mark.parametrize("name", ["disagg", "ray"])
def test_a_loop_that_is_ended_waits_for_the_end_of_what_it_keeps(tmp_path: Path, name: str) -> None:
    ending = f"trap 'sleep 0.5; touch {tmp_path}/ended; exit 0' TERM\ntouch {tmp_path}/begun"
    loop = start_loop(tmp_path, name, f"{ending}\nwhile :; do sleep 0.05; done")
    (pid,) = starts(tmp_path, 1)
    deadline = time.monotonic() + 60
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    loop.terminate()
    loop.wait(60)
    assert (tmp_path / "ended").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert len(starts(tmp_path, 1)) == 1


@pytest.mark.parametrize("name", ["disagg", "ray"])
def test_ray_stop_knows_the_loops_by_their_name(tmp_path: Path, name: str) -> None:
    code = "import json; from ray.autoscaler._private.constants import RAY_PROCESSES as p"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print('RESULT' + json.dumps(p))"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    ended = json.loads(done.stdout.rpartition("RESULT")[2])
    in_arguments = [keyword for keyword, by_name in ended if not by_name]
    loop = start_loop(tmp_path, name, UNTIL_ASKED)
    starts(tmp_path, 1)
    command = Path(f"/proc/{loop.pid}/cmdline").read_text().replace("\0", " ")
    loop.terminate()
    loop.wait(60)
    assert [keyword for keyword in in_arguments if keyword in command] == ["monitor.py"]
    # Control: without its name `ray stop` would leave it.
    unnamed = command.replace("monitor.py", "")
    assert not [keyword for keyword in in_arguments if keyword in unnamed]
