"""Ray's head is lost and comes back: with its state, which is in Redis, or at another address.

Ray is started by its own command on every host, `disagg serve` on one that is not the head.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint, reference_generate
from tests.hosts.fleet import Fleet, make_environment, wait_for
from tests.hosts.hosts import Host, hosts
from tests.hosts.ray_by_hand import (
    copy_secrets,
    join,
    join_again_and_again,
    kill_ray,
    serve,
    start_head,
    start_redis,
)

pytestmark = pytest.mark.timeout(1800)
NEEDS_REDIS = pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server")

NUM_TOKENS = 16
HEAD_NAME = "ray-head"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "gemma3")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("environment"))


@pytest.fixture
def fleet(
    tmp_path_factory: pytest.TempPathFactory, environment: Path, model_dir: Path
) -> Iterator[Fleet]:
    """A host that serves, two that may be the head, and one more."""
    with hosts(5, tmp_path_factory.mktemp("keys"), [environment, model_dir]) as machines:
        laptop, *others = machines
        made = Fleet(laptop, others, environment, model_dir)
        made.prepare()
        made.edit_settings("num_hosts: 4", "num_hosts: 3")
        copy_secrets(made)
        yield made


@pytest.fixture(scope="module")
def right(model_dir: Path) -> tuple[list[int], list[int]]:
    """A prompt, and what plain transformers makes of it."""
    for first in range(50):
        prompt = [10 + (first + 7 * i) % 80 for i in range(40)]
        tokens, _, gap = reference_generate(model_dir, prompt, NUM_TOKENS)
        if gap > 1e-3:
            return prompt, tokens
    raise AssertionError("no prompt whose answer is clear")


def is_right(fleet: Fleet, right: tuple[list[int], list[int]]) -> bool:
    prompt, tokens = right
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "return_token_ids": True}
    status, answer = fleet.ask(body)
    assert status in (0, 200, 503), (status, answer)
    if status == 200:
        assert answer["choices"][0]["token_ids"] == tokens
    return status == 200


def num_nodes(head: Host) -> int:
    """How many nodes the cluster has by its head; 0 while that does not answer."""
    status = "PATH=$HOME/disagg-env/bin:$PATH RAY_AUTH_MODE=token ray status"
    shown = head.run(status, check=False).stdout
    return len([line for line in shown.splitlines() if "node_" in line])


def reload(fleet: Fleet) -> None:
    """Let a new supervisor come."""
    (pid,) = fleet.pids("disagg [s]erve")[0]
    fleet.head.run(f"kill -HUP {pid}")


@NEEDS_REDIS
def test_with_its_state_in_redis_the_head_finds_the_actors_again(
    fleet: Fleet, right: tuple[list[int], list[int]]
) -> None:
    serving, head, other, _ = fleet.hosts
    at_redis = start_redis(serving)
    start_head(head, at_redis)
    join(serving, head.address)
    join(other, head.address)
    serve(serving)
    fleet.wait_until_complete()
    assert is_right(fleet, right)
    assert head.address not in fleet.places().values()
    epochs, complete = fleet.epochs(), fleet.num_complete()
    workers = fleet.pids("ray::[W]orkerActor")

    kill_ray(head)
    assert is_right(fleet, right)  # no token passes through it
    start_head(head, at_redis)
    reload(fleet)
    fleet.wait_until_complete(complete)
    assert "found workers decode-0, prefill-0" in fleet.log()
    assert fleet.epochs() == epochs
    assert fleet.pids("ray::[W]orkerActor") == workers
    assert is_right(fleet, right)


@pytest.mark.parametrize("storage", ["own", pytest.param("redis", marks=NEEDS_REDIS)])
def test_a_head_that_returns_at_another_address_has_the_fleet_complete_without_a_hand(
    fleet: Fleet, right: tuple[list[int], list[int]], storage: str
) -> None:
    serving, head, other, next_head = fleet.hosts
    for host in fleet.hosts:
        host.run(f"cp /etc/hosts hosts; echo {head.address} {HEAD_NAME} >> /etc/hosts")
    environment = start_redis(serving) if storage == "redis" else ""
    start_head(head, environment)
    for host in (serving, other):
        join_again_and_again(host, HEAD_NAME)
    serve(serving)
    fleet.wait_until_complete()
    assert is_right(fleet, right)
    (kept,), (router,) = (fleet.pids(one)[0] for one in ("disagg [s]erve", "disagg.commands [r]"))
    complete = fleet.num_complete()

    kill_ray(head)
    assert is_right(fleet, right)
    for host in fleet.hosts:  # as a name service would
        host.run(f"echo {next_head.address} {HEAD_NAME} | cat hosts - > /etc/hosts")
    start_head(next_head, environment)
    if storage == "redis":  # all go on with it, nobody has to begin anew: so somebody is killed
        wait_for(lambda: num_nodes(next_head) == 3, fleet.log)
        assert fleet.num_complete() == complete
        (killed,) = fleet.pids("ray::[W]orkerActor")[fleet.hosts.index(other)]
        other.run(f"kill -KILL {killed}")
    fleet.wait_until_complete(complete)
    wait_for(lambda: is_right(fleet, right), fleet.log)
    # Nothing was asked to: what keeps router and supervisor running is the same, as is the router.
    assert fleet.pids("disagg [s]erve")[0] == [kept]
    assert fleet.pids("disagg.commands [r]")[0] == [router]
    assert num_nodes(next_head) == 3
