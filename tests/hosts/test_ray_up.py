"""`ray up cluster.yaml` as shipped, on three hosts and a laptop, until `ray down`.

The tests are steps of one life and run in their order.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint, reference_generate
from tests.hosts.fleet import BOUND_S, Fleet, make_environment, wait_for
from tests.hosts.hosts import Hosts, hosts

pytestmark = pytest.mark.timeout(1800)

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
    made.wait_until_served()
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


def test_a_host_that_loses_ray_is_replaced_and_used_again(
    fleet: Fleet, right: tuple[list[int], list[int]]
) -> None:
    lost = fleet.places()["decode-0"]
    (host,) = [host for host in fleet.hosts if host.address == lost]
    pids = host.run("pgrep -f '[r]ay'").stdout.split()
    host.run(f"kill -KILL {' '.join(pids)}", check=False)
    before = fleet.log().count("worker decode-0 serves again")
    wait_for(lambda: fleet.log().count("worker decode-0 serves again") > before, fleet.log)
    wait_for(lambda: is_right(fleet, right), fleet.log)
    # The autoscaler starts Ray there again, and the workers end up on different hosts.
    joined = "ray exec cluster.yaml 'ray status' 2>&1"
    wait_for(lambda: " 3 local.cluster.node" in fleet.do(joined), lambda: fleet.do(joined))
    wait_for(lambda: len(set(fleet.places().values())) == 2, fleet.log)
    wait_for(lambda: is_right(fleet, right), fleet.log)


def test_a_second_ray_up_changes_a_setting_and_lets_what_runs_end(
    fleet: Fleet, right: tuple[list[int], list[int]]
) -> None:
    prompt, tokens = right
    fleet.edit_settings("num_blocks: 256", "num_blocks: 300")
    body = {"prompt": prompt, "max_tokens": 400, "return_token_ids": True}
    words = fleet.ask_in_background(body, "runs-meanwhile")
    wait_for(lambda: fleet.record("runs-meanwhile").get("first_token_ms"), fleet.log)
    fleet.up()
    said, complained = words.communicate(timeout=BOUND_S)
    status, answer = fleet.read(said)
    assert status == 200, complained
    assert answer["choices"][0]["token_ids"][:NUM_TOKENS] == tokens
    assert answer["usage"]["completion_tokens"] == 400

    fleet.wait_until_served()
    assert "300 KV blocks" in fleet.log()
    assert len(set(fleet.places().values())) == 2
    wait_for(lambda: is_right(fleet, right), fleet.log)
    for host in fleet.hosts[1:]:  # the first one's has ended
        assert len(host.run("pgrep -f '[r]ay start --block'").stdout.split()) == 1


def test_ray_down_leaves_no_process_on_any_host(fleet: Fleet) -> None:
    assert all(any(host.name in line for line in fleet.left()) for host in fleet.hosts)
    fleet.do("ray down cluster.yaml -y > down.log 2>&1 || { cat down.log; exit 1; }")
    wait_for(lambda: not fleet.left(), lambda: "\n".join(fleet.left()))
