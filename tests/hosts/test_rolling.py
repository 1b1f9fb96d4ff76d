"""Every component restarts in turn under load, and clients that never try again lose nothing.

Two prefill and two decode workers on two hosts, each of which runs `disagg serve`: a router, and a
supervisor, of which one stands by. Ray's head is on a third host, with its state in Redis.
"""

import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.hosts.fleet import BOUND_S, SEND, Fleet, make_environment, wait_for
from tests.hosts.hosts import Host, hosts
from tests.hosts.ray_by_hand import (
    RAY,
    copy_secrets,
    join_again_and_again,
    kill_ray,
    serve,
    start_head,
    start_redis,
)
from tests.process.harness import MODEL
from tests.process.timed_load import Expected, Load, clear_prompts, load

pytestmark = [
    pytest.mark.timeout(3000),
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server"),
]

WORKERS = {"prefill-0", "prefill-1", "decode-0", "decode-1"}
PATIENT = "RAY_gcs_rpc_server_reconnect_timeout_s=300"
"""On a busy machine Ray's head takes more than its minute to start."""
NUM_ANSWERS = 12
"""Each restart is followed by so many answers before the next one."""


class Rolling:
    """The fleet, and how each of its components is restarted."""

    def __init__(self, fleet: Fleet, at_redis: str) -> None:
        self.fleet = fleet
        self.east, self.west, self.ray_head = fleet.hosts
        self.at_redis = at_redis

    @property
    def serving(self) -> tuple[Host, Host]:
        return self.east, self.west

    @property
    def urls(self) -> list[str]:
        return [f"http://{host.address}:8000" for host in self.serving]

    def workers(self, host: Host) -> dict[str, dict[str, Any]]:
        """What a host's router knows of the workers, by id."""
        words = ("http://127.0.0.1:8001/v1/disagg/workers", "", "{}")
        said = host.run(f"{SEND} {shlex.join(words)}", check=False).stdout
        status, _, text = said.partition(" ")
        found = json.loads(text)["workers"] if status == "200" else []
        return {one["info"]["incarnation"]["worker_id"]: one for one in found}

    def epochs(self) -> dict[str, str]:
        """Of the workers, once both routers have all of them ready."""

        def ready() -> dict[str, str]:
            seen = [
                {
                    name: one["info"]["incarnation"]["epoch"]
                    for name, one in self.workers(host).items()
                    if one["ready"]
                }
                for host in self.serving
            ]
            return seen[0] if seen[0] == seen[1] and seen[0].keys() == WORKERS else {}

        found: dict[str, str] = wait_for(ready, self.log, 2 * BOUND_S)
        return found

    def log(self) -> str:
        """What was said last by Ray and by disagg, on every host."""
        tail = "tail -n 60 disagg-ray.log disagg.log"
        return "\n".join(host.run(tail, check=False).stdout for host in self.fleet.hosts)

    def pid(self, host: Host, pattern: str) -> str:
        found = host.run(f"pgrep -f {shlex.quote(pattern)}", check=False).stdout.split()
        return found[0] if len(found) == 1 else ""

    def supervisor_in_charge(self) -> Host:
        """The host whose supervisor said last that it is, by the number of its claim."""

        def number(host: Host) -> int:
            said = host.run("grep -o 'in charge as supervisor [0-9]*' disagg.log", check=False)
            lines = said.stdout.splitlines()
            return int(lines[-1].split()[-1]) if lines else 1 if host is self.east else 0

        return max(self.serving, key=number)

    def change(self, old: str, new: str, *on: Host) -> None:
        """Let hosts read other settings."""
        self.fleet.edit_settings(old, new)
        copy_secrets(self.fleet)
        for host in on:
            host.run(f"kill -HUP {self.pid(host, 'disagg [s]erve')}")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "gemma3")


@pytest.fixture(scope="module")
def rolling(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Rolling]:
    environment = make_environment(tmp_path_factory.mktemp("environment"))
    with (
        hosts(4, tmp_path_factory.mktemp("keys"), [environment, model_dir]) as machines,
        machines[0].network(),
    ):
        laptop, east, west, head = machines
        fleet = Fleet(laptop, [east, west, head], environment, model_dir)
        fleet.prepare()
        addresses = ", ".join(f'"{host.address}:50051"' for host in (east, west))
        keys = "api_keys_file: ~/disagg-keys.json"
        for old, new in (
            (f'["{east.address}:50051"]', f"[{addresses}]"),
            (keys, f"allow_unauthenticated: true\n  records_max: 1000\n  # {keys}"),
            ("name: my-model", f"name: {MODEL}"),
            ("num_prefill: 1", "num_prefill: 2"),
            ("num_decode: 1", "num_decode: 2"),
        ):
            fleet.edit_settings(old, new)
        copy_secrets(fleet)
        made = Rolling(fleet, start_redis(laptop))
        start_head(head, made.at_redis, "--num-cpus=0")
        for host in made.serving:
            join_again_and_again(host, head.address, PATIENT)
        serve(east, PATIENT)
        wait_for(fleet.num_complete, made.log)
        serve(west, PATIENT)
        made.epochs()
        wait_for(lambda: "this one stands by" in west.run("cat disagg.log").stdout, made.log)
        yield made


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[Expected]:
    return clear_prompts(model_dir)


def wait_answers(running: Load) -> None:
    """Until so many more requests have ended, or one has failed."""
    before = sum(bool(one.ended_s) for one in list(running.sent))
    wait_for(
        lambda: (
            sum(bool(one.ended_s) for one in list(running.sent)) >= before + NUM_ANSWERS
            or errors(running)
        ),
        lambda: "no answers",
    )
    assert not errors(running)


def errors(running: Load) -> list[str]:
    return [one.error for one in list(running.sent) if one.error]


def test_every_component_restarts_and_no_request_fails(
    rolling: Rolling, prompts: list[Expected], capsys: pytest.CaptureFixture[str]
) -> None:
    before = rolling.epochs()
    with load(rolling.urls, prompts) as running:
        # Workers, one after the other.
        rolling.change("num_blocks: 256", "num_blocks: 300", *rolling.serving)

        def all_anew() -> bool:
            epochs = rolling.epochs()
            return all(epochs[name] != before[name] for name in WORKERS)

        wait_for(all_anew, rolling.log, 3 * BOUND_S)
        wait_answers(running)

        # Routers, one after the other.
        for number, host in enumerate(rolling.serving):
            router = rolling.pid(host, "disagg.commands [r]outer")
            assert router
            rolling.change(f"records_max: {1000 + number}", f"records_max: {1001 + number}", host)

            def replaced(host: Host = host, router: str = router) -> bool:
                return rolling.pid(host, "disagg.commands [r]outer") not in ("", router)

            wait_for(replaced, rolling.log)
            rolling.epochs()
            wait_answers(running)

        # The supervisor: the one that stands by takes over, and touches no worker.
        epochs = rolling.epochs()
        there = rolling.supervisor_in_charge()
        there.run(f"kill -KILL {rolling.pid(there, 'disagg.commands [w]orkers')}")
        wait_for(lambda: rolling.supervisor_in_charge() is not there, rolling.log)
        wait_for(lambda: rolling.pid(there, "disagg.commands [w]orkers"), rolling.log)
        wait_answers(running)
        assert rolling.epochs() == epochs

        # Ray's head: the workers are the same, and the supervisor goes on.
        kill_ray(rolling.ray_head)
        wait_answers(running)
        start_head(rolling.ray_head, rolling.at_redis, "--num-cpus=0")
        scale = f"{RAY} disagg scale --config disagg.yaml --prefill 2 --decode 2"

        def taken_up() -> bool:
            said = rolling.west.run(scale, bound_s=BOUND_S, check=False).stdout
            return "serving: decode 2, prefill 2" in said

        wait_for(taken_up, rolling.log)
        wait_answers(running)
        assert rolling.epochs() == epochs
    assert errors(running) == []
    ended = [one for one in running.sent if one.ended_s]
    with capsys.disabled():
        longest = max(one.stood_s(0.0) for one in ended)
        print(f"\n{len(ended)} requests, none failed; the longest stood still for {longest:.1f} s")


def test_a_router_that_is_killed_fails_requests(rolling: Rolling, prompts: list[Expected]) -> None:
    """Control: these clients notice."""
    with load(rolling.urls, prompts) as running:
        rolling.east.run(f"kill -KILL {rolling.pid(rolling.east, 'disagg.commands [r]outer')}")
        wait_for(lambda: errors(running), lambda: "no request has failed")
    rolling.epochs()
