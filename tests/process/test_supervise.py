"""Ray starts, restarts and ends the actors' processes; the workers in them are stand-ins."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.process.harness import wait_until
from tests.process.program import BOUND_S, Program, wait_until_gone
from tests.process.replicas import free_port

MODULE = "tests.process.supervised_run"

# Slow, as a run of the normal tests starts one Ray cluster only: that of test_serve.
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def run(model_dir: Path) -> Iterator[Program]:
    started = Program(MODULE, str(model_dir), cwd=model_dir)
    yield started
    started.end()


SERVES = r"worker {} serves{} on \S+ \(pid (\d+), epoch (\w+)\)"


def test_a_dead_process_is_a_new_epoch_and_nothing_is_left(run: Program, model_dir: Path) -> None:
    workers = [SERVES.format(name, "") for name in ("prefill-0", "decode-0")]
    first, other = run.wait_for_all(workers)
    run.wait_for("all serve")
    assert first[1] != other[1]

    os.kill(int(first[1]), signal.SIGKILL)
    again = run.wait_for(SERVES.format("prefill-0", " again"))
    assert again[1] != first[1]
    assert again[2] != first[2]

    (model_dir / "fail-decode-0").touch()  # the worker inside fails, its process must follow
    other_again = run.wait_for(SERVES.format("decode-0", " again"))
    assert other_again[1] != other[1]
    assert other_again[2] != other[2]

    tree = run.tree()
    assert {int(again[1]), int(other_again[1])} <= {process.pid for process in tree}
    assert run.process.stdin is not None
    run.process.stdin.close()
    assert run.process.wait(BOUND_S) == 0
    wait_until_gone(tree)


def test_a_killed_driver_leaves_no_process(run: Program) -> None:
    run.wait_for("all serve")
    tree = run.tree()
    assert len(tree) > 3
    run.process.kill()
    wait_until_gone(tree)


def test_a_refused_checkpoint_is_one_sentence(model_dir: Path) -> None:
    (model_dir / "refuse-decode-0").touch()
    run = Program(MODULE, str(model_dir), cwd=model_dir)
    run.wait_for(r"^ConfigError: worker decode-0: model\.dir: this checkpoint is not to my taste$")
    assert run.process.wait(BOUND_S) == 2


def test_sigterm_lets_a_worker_drain_and_ray_starts_it_anew(run: Program, model_dir: Path) -> None:
    first = run.wait_for(SERVES.format("prefill-0", ""))
    run.wait_for("all serve")
    os.kill(int(first[1]), signal.SIGTERM)
    again = run.wait_for(SERVES.format("prefill-0", " again"))
    assert again[2] != first[2]
    assert (model_dir / "drained-prefill-0").exists()
    assert not (model_dir / "drained-decode-0").exists()


def test_workers_find_the_routers_that_have_announced_themselves(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (model_dir / "look-up").touch()
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_layers=1)
    run = Program(MODULE, str(model_dir), cwd=model_dir)
    routers = []
    try:
        ray = run.wait_for(r"^ray (\S+) (\w+)$")
        run.wait_for("all serve")
        given = {
            "model.dir": checkpoint,
            "cluster.ray_address": ray[1],
            "cluster.router_addresses": "ray",
            "cluster.hash_key": "ab" * 32,
            "cluster.allow_insecure": "true",
            "router.http_port": "0",
            "router.admin_port": "0",
        }
        ports = [free_port(), free_port()]
        for port in ports:
            options = [f"--set={key}={value}" for key, value in given.items()]
            options.append(f"--set=router.grpc_port={port}")
            environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": ray[2]}
            routers.append(
                Program(
                    "disagg.commands", "router", *options, cwd=model_dir, environment=environment
                )
            )

        def found() -> str:
            place = model_dir / "routers-decode-0"
            return place.read_text() if place.exists() else ""

        both = " ".join(sorted(f"127.0.0.1:{port}" for port in ports))
        wait_until(lambda: found() == both, f"{both} to be found", BOUND_S)
        routers[0].process.send_signal(signal.SIGTERM)
        assert routers[0].process.wait(BOUND_S) == 0
        left = f"127.0.0.1:{ports[1]}"
        wait_until(lambda: found() == left, f"{left} alone", BOUND_S)
    finally:
        for router in routers:
            router.end()
        run.end()
