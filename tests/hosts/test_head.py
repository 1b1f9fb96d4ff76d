"""Ray's head is lost and comes back with its state, which is in Redis.

Ray is started by its own command on every host, `disagg serve` on one that is not the head.
"""

import shutil
from collections.abc import Iterator

import pytest

from tests.checkpoints import make_checkpoint, reference_generate
from tests.hosts.fleet import Fleet, make_environment
from tests.hosts.hosts import Host, hosts

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server"),
]

PORT, REDIS_PORT = 6379, 6390
NUM_TOKENS = 16
RAY = (
    "PATH=$HOME/disagg-env/bin:$PATH RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0"
    " RAY_worker_niceness=0 RAY_enable_autoscaler_v2=0"
)
OF_RAY = "[g]cs_server|[r]aylet/|ray [s]tart"


def start(host: Host, command: str, log: str, environment: str = "") -> None:
    """Start what stays, as a system's own supervisor would."""
    host.run(f"{RAY} {environment} setsid nohup {command} >> ~/{log} 2>&1 < /dev/null &")


def start_ray(host: Host, head: Host, environment: str = "") -> None:
    role = (
        f"--head --port={PORT} --include-dashboard=false"
        if host is head
        else f"--address={head.address}:{PORT}"
    )
    command = f"ray start --block --node-ip-address={host.address} {role}"
    start(host, command, "disagg-ray.log", environment)


def kill_ray(host: Host) -> None:
    pids = host.run(f"pgrep -f '{OF_RAY}'").stdout.split()
    host.run(f"kill -KILL {' '.join(pids)}", check=False)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    model_dir = make_checkpoint(tmp_path_factory.mktemp("model"), "gemma3")
    environment = make_environment(tmp_path_factory.mktemp("environment"))
    with hosts(4, tmp_path_factory.mktemp("keys"), [environment, model_dir]) as machines:
        laptop, serving, *others = machines
        made = Fleet(laptop, [serving, *others], environment, model_dir)
        made.prepare()
        for host in made.hosts:
            to = f"{host.name}:"
            made.do(
                "S='ssh -o StrictHostKeyChecking=no'; R=\"rsync -a --rsh='$S'\";"
                f" $S {host.name} mkdir -p .ray; eval $R .ray/auth_token {to}.ray/;"
                f" eval $R disagg.yaml disagg-keys.json disagg-hash-key {to};"
                f" eval $R certificates/node/ {to}disagg-certificates"
            )
        yield made


@pytest.fixture(scope="module")
def right(fleet: Fleet) -> tuple[list[int], list[int]]:
    """A prompt, and what plain transformers makes of it."""
    for first in range(50):
        prompt = [10 + (first + 7 * i) % 80 for i in range(40)]
        tokens, _, gap = reference_generate(fleet.model_dir, prompt, NUM_TOKENS)
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


def reload(fleet: Fleet) -> None:
    """Let a new supervisor come."""
    (pid,) = fleet.pids("disagg [s]erve")[0]
    fleet.head.run(f"kill -HUP {pid}")


def test_with_its_state_in_redis_the_head_finds_the_actors_again(
    fleet: Fleet, right: tuple[list[int], list[int]]
) -> None:
    serving, head, other = fleet.hosts
    redis = f"redis-server --port {REDIS_PORT} --bind 0.0.0.0 --protected-mode no --save ''"
    start(serving, redis, "redis.log")
    at_redis = f"RAY_REDIS_ADDRESS={serving.address}:{REDIS_PORT}"
    start_ray(head, head, at_redis)
    start_ray(serving, head)
    start_ray(other, head)
    start(serving, "disagg serve --config disagg.yaml", "disagg.log")
    fleet.wait_until_complete()
    assert is_right(fleet, right)
    assert head.address not in fleet.places().values()
    epochs, complete = fleet.epochs(), fleet.num_complete()
    workers = fleet.pids("ray::[W]orkerActor")

    kill_ray(head)
    assert is_right(fleet, right)  # no token passes through it
    start_ray(head, head, at_redis)
    reload(fleet)
    fleet.wait_until_complete(complete)
    assert "found workers decode-0, prefill-0" in fleet.log()
    assert fleet.epochs() == epochs
    assert fleet.pids("ray::[W]orkerActor") == workers
    assert is_right(fleet, right)
