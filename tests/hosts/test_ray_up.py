"""`ray up cluster.yaml` as shipped, on three hosts and a laptop, until `ray down`.

The tests are steps of one life and run in their order.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint, reference_generate
from tests.hosts.fleet import BOUND_S, Fleet, make_environment, wait_for
from tests.hosts.hosts import Host, Hosts, hosts
from tests.hosts.ray_by_hand import kill_ray

pytestmark = pytest.mark.timeout(1800)

LASTING = (
    "ray [s]tart --block",
    "[g]cs_server",
    "[r]aylet/raylet",
    "disagg [s]erve",
    "[r]outer --c",
)
"""What another `ray up` does not touch."""
NUM_TOKENS = 24
GAP_MIN = 1e-3


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "gemma3")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("environment"))


@pytest.fixture(scope="module")
def machines(
    tmp_path_factory: pytest.TempPathFactory, environment: Path, model_dir: Path
) -> Iterator[Hosts]:
    with hosts(4, tmp_path_factory.mktemp("keys"), [environment, model_dir]) as made:
        yield made


@pytest.fixture(scope="module")
def fleet(machines: Hosts, environment: Path, model_dir: Path) -> Fleet:
    laptop, *others = machines
    made = Fleet(laptop, others, environment, model_dir)
    made.prepare()
    made.up()
    made.wait_until_complete()
    return made


@pytest.fixture(scope="module")
def right(model_dir: Path) -> tuple[list[int], list[int]]:
    """A prompt longer than the model's window, and what plain transformers makes of it."""
    for first in range(50):
        prompt = [10 + (first + 7 * i) % 80 for i in range(70)]
        tokens, _, gap = reference_generate(model_dir, prompt, NUM_TOKENS)
        if gap > GAP_MIN:
            return prompt, tokens
    raise AssertionError("no prompt whose answer is clear")


def is_right(fleet: Fleet, right: tuple[list[int], list[int]], request_id: str = "") -> bool:
    prompt, tokens = right
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "return_token_ids": True}
    status, answer = fleet.ask(body, request_id=request_id)
    assert status in (0, 200, 503), (status, answer)
    if status == 200:
        assert answer["choices"][0]["token_ids"] == tokens
    return status == 200


def test_all_hosts_join_and_workers_are_spread_over_them(fleet: Fleet) -> None:
    said = fleet.do("ray exec cluster.yaml 'ray status' 2>&1")
    assert " 3 local.cluster.node" in said
    head, *others = (host.address for host in fleet.hosts)
    assert set(fleet.places()) == {"prefill-0", "decode-0"}
    assert sorted(fleet.places().values()) == sorted(others)  # one each, and the head has none
    for host in fleet.hosts[1:]:
        (line,) = host.run("ps -e -o ni=,args= | grep '[r]ay::WorkerActor'").stdout.splitlines()
        assert line.split()[0] == "0"
    assert "Failed to parse event" not in fleet.log()
    assert head in fleet.do("ray get-head-ip cluster.yaml")


def test_a_request_from_another_host_is_handed_over_between_hosts(
    fleet: Fleet, machines: Hosts, right: tuple[list[int], list[int]]
) -> None:
    assert is_right(fleet, right, "over-the-wire")
    (generation,) = fleet.record("over-the-wire")["generations"]
    assert generation["prefill"]["worker_id"] == "prefill-0"
    assert generation["decode"]["worker_id"] == "decode-0"
    assert generation["transfer"]["num_reads"] > 0
    assert sum(group["pulled_bytes"] for group in generation["transfer"]["groups"]) > 0
    status, _ = fleet.ask({"prompt": [10], "max_tokens": 1}, key="disagg-stranger")
    assert status == 401

    # Without the link between the two the answer is the same, but nothing is handed over.
    there = [host for host in machines if host.address in fleet.places().values()]
    machines.cut(*there)
    try:
        wait_for(lambda: is_right(fleet, right, "cut"), fleet.log)
        last = fleet.record("cut")["generations"][-1]
        transfer = last["transfer"]
        assert last["local"] or transfer is None or transfer["failed"]
    finally:
        machines.heal(*there)


def test_a_second_ray_up_changes_a_setting_and_loses_no_request(
    fleet: Fleet, right: tuple[list[int], list[int]]
) -> None:
    prompt, tokens = right
    fleet.edit_settings("num_blocks: 256", "num_blocks: 300")
    epochs, complete = fleet.epochs(), fleet.num_complete()
    lasting = [fleet.pids(pattern) for pattern in LASTING]
    body = {"prompt": prompt, "max_tokens": 400, "return_token_ids": True}
    long = fleet.ask_in_background(body, "runs-meanwhile")
    wait_for(lambda: fleet.record("runs-meanwhile").get("first_token_ms"), fleet.log)
    with fleet.load(body | {"max_tokens": NUM_TOKENS}) as answers:
        fleet.up()
        fleet.wait_until_complete(complete)
    assert {status for status, _ in answers} == {200}, answers
    for _, answer in answers:
        assert answer["choices"][0]["token_ids"] == tokens
    said, complained = long.communicate(timeout=BOUND_S)
    status, answer = fleet.read(said)
    assert status == 200, complained
    assert answer["choices"][0]["token_ids"][:NUM_TOKENS] == tokens
    assert answer["usage"]["completion_tokens"] == 400

    taken = re.findall(r"^.* disagg: worker \S+ takes .* 300 KV blocks", fleet.log(), re.MULTILINE)
    assert len(taken) == len(epochs), fleet.log()
    assert all(fleet.epochs()[worker] != epoch for worker, epoch in epochs.items())
    assert [fleet.pids(pattern) for pattern in LASTING] == lasting


def test_a_changed_count_touches_no_other_worker(
    fleet: Fleet, right: tuple[list[int], list[int]]
) -> None:
    epochs, complete = fleet.epochs(), fleet.num_complete()
    fleet.edit_settings("num_prefill: 1", "num_prefill: 2")
    fleet.edit_settings("num_decode: 1", "num_decode: 2")
    fleet.up()
    fleet.wait_until_complete(complete)
    assert set(fleet.epochs()) == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    assert {worker: fleet.epochs()[worker] for worker in epochs} == epochs
    assert len(set(fleet.places().values())) == 3
    assert is_right(fleet, right)


def test_a_host_that_loses_ray_is_replaced_and_used_again(
    fleet: Fleet, right: tuple[list[int], list[int]]
) -> None:
    complete = fleet.num_complete()
    places = fleet.places()
    lost = max(sorted(places.values()), key=[*places.values()].count)
    (host,) = [host for host in fleet.hosts if host.address == lost]
    pids = host.run("pgrep -f '[r]ay'").stdout.split()
    host.run(f"kill -KILL {' '.join(pids)}", check=False)
    fleet.wait_until_complete(complete)
    wait_for(lambda: is_right(fleet, right), fleet.log)
    # The autoscaler starts Ray there again, and a worker moves there from a host that has two.
    wait_for(lambda: lost in fleet.places().values(), fleet.log)
    assert f"moves to {lost}, where there are fewer" in fleet.log()
    assert is_right(fleet, right)


def test_serving_goes_on_without_the_head_and_its_return_completes_the_fleet(
    fleet: Fleet, right: tuple[list[int], list[int]]
) -> None:
    complete = fleet.num_complete()
    (router,) = fleet.pids("disagg.commands [r]outer")[0]
    kill_ray(fleet.head)
    assert is_right(fleet, right)
    # What `ray up` left on the head starts it again; nobody does anything.
    fleet.wait_until_complete(complete)
    wait_for(lambda: is_right(fleet, right), fleet.log)
    assert fleet.pids("disagg.commands [r]outer")[0] == [router]


def test_ray_down_leaves_no_process_on_any_host(fleet: Fleet) -> None:
    def has_some(host: Host) -> bool:
        return any(host.name in line for line in fleet.left())

    wait_for(lambda: all(map(has_some, fleet.hosts)), fleet.log)  # each comes back after the head
    fleet.do("ray down cluster.yaml -y > down.log 2>&1 || { cat down.log; exit 1; }")
    wait_for(lambda: not fleet.left(), lambda: "\n".join([*fleet.left(), fleet.log()]), 3 * BOUND_S)
