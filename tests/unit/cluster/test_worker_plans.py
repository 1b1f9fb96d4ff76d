"""Names of actors say which settings a worker runs with; what changes which names."""

from pathlib import Path
from typing import Any

import pytest

from disagg.cluster.counts import Counts
from disagg.cluster.roles import assign_roles
from disagg.cluster.worker_actors import ActorName
from disagg.cluster.worker_plans import WorkerPlans
from disagg.config import Settings
from disagg.workers.actor import WORKER_PATH

CLUSTER = {"num_prefill": 2, "num_decode": 1, "hash_key": "ab" * 32}


def names(folder: Path, cluster: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    (folder / "config.json").write_text("{}")
    given = {"model": {"dir": str(folder)}, "cluster": CLUSTER | (cluster or {})} | sections
    return plans_of(Settings.model_validate(given)).names


def plans_of(settings: Settings) -> WorkerPlans:
    return WorkerPlans(settings, WORKER_PATH, assign_roles(Counts.of_settings(settings)))


def test_the_same_settings_give_the_same_names(tmp_path: Path) -> None:
    assert names(tmp_path) == names(tmp_path)
    assert set(names(tmp_path)) == {"prefill-0", "prefill-1", "decode-0"}


@pytest.mark.parametrize(
    "changed",
    [
        {"cluster": {"num_prefill": 1, "num_decode": 3}},
        {"router": {"http_port": 8080}},
        {"cluster": {"num_hosts": 3, "start_timeout_s": 20}},
    ],
)
def test_what_is_not_a_workers_own_renames_none(tmp_path: Path, changed: dict[str, Any]) -> None:
    before, after = names(tmp_path), names(tmp_path, **changed)
    both = before.keys() & after.keys()
    assert len(both) >= 2
    assert {one: before[one] for one in both} == {one: after[one] for one in both}


@pytest.mark.parametrize(
    "changed",
    [
        {"worker": {"num_blocks": 77}},
        {"cluster": {"hash_key": "cd" * 32}},
        {"cluster": {"num_cpus_per_worker": 2}},
        {"cluster": {"role_resources": True}},
    ],
)
def test_what_is_a_workers_own_renames_all(tmp_path: Path, changed: dict[str, Any]) -> None:
    before, after = names(tmp_path), names(tmp_path, **changed)
    assert before.keys() == after.keys()
    assert all(before[one] != after[one] for one in before)


def test_hosts_that_come_and_go_rename_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    given = {"model": {"dir": str(tmp_path)}, "cluster": CLUSTER}
    plans = plans_of(Settings.model_validate(given))
    before = dict(plans.names)
    node = {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 4.0}}
    assert plans.resolve("decode-0").workers_per_host == 3
    plans.divide([node, node, node])
    assert plans.resolve("decode-0").workers_per_host == 1
    assert plans.resolve("decode-0").device == "cuda"
    assert plans.names == before


@pytest.mark.parametrize("role_resources", [False, True])
def test_another_role_renames_no_worker_that_can_take_it_where_it_is(
    tmp_path: Path, role_resources: bool
) -> None:
    (tmp_path / "config.json").write_text("{}")
    cluster = CLUSTER | {"role_resources": role_resources}
    given = {"model": {"dir": str(tmp_path)}, "cluster": cluster}
    settings = Settings.model_validate(given)
    as_prefill, as_decode = (
        WorkerPlans(settings, WORKER_PATH, {"prefill-0": role}) for role in ("prefill", "decode")
    )
    assert as_decode.options["prefill-0"].role == "decode"
    assert (as_prefill.names == as_decode.names) is not role_resources


def test_names_of_actors_are_read_back_and_others_are_not_ours() -> None:
    name = ActorName("prefill-0", "0123456789abcdef")
    assert ActorName.parse(str(name)) == name
    for other in ("disagg-routers", "disagg-worker", "disagg-worker/prefill-0", "x/prefill-0/1"):
        assert ActorName.parse(other) is None


def test_a_name_does_not_give_the_clusters_secret_away(tmp_path: Path) -> None:
    assert all(str(CLUSTER["hash_key"])[:16] not in str(name) for name in names(tmp_path).values())
