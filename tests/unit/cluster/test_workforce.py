"""Which workers are wanted, who serves and why others do not; without Ray."""

from pathlib import Path
from typing import Any

import pytest

from disagg.cluster import supervised
from disagg.cluster.supervised import Supervised
from disagg.cluster.worker_actors import ActorName
from disagg.cluster.worker_plans import WorkerPlans
from disagg.cluster.workforce import Workforce
from disagg.config import Settings
from disagg.workers.actor import WORKER_PATH, WorkerState

OLD = "0" * 16
ROLES = {"prefill-0": "prefill", "decode-0": "decode"}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "config.json").write_text("{}")
    cluster = {"hash_key": "ab" * 32}
    return Settings.model_validate({"model": {"dir": str(tmp_path)}, "cluster": cluster})


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def workforce(settings: Settings, said: list[str]) -> Workforce:
    workforce = Workforce(WorkerPlans(settings, WORKER_PATH, ROLES), said.append, 60.0)
    workforce.want(workforce.plans)
    return workforce


def plans(settings: Settings, **roles: str) -> WorkerPlans:
    given = {name.replace("_", "-"): role for name, role in roles.items()}
    return WorkerPlans(settings, WORKER_PATH, given)


def serve(worker: Supervised, role: str, unregistered: str = "") -> None:
    worker.actor, worker.serves, worker.node_id = object(), True, "host"
    worker.state = WorkerState(
        worker.worker_id, role, "e", "a:1", "host", 1, "", "", unregistered=unregistered
    )


def named(workforce: Workforce, worker_id: str) -> Supervised:
    (found,) = [w for w in workforce.workers if w.worker_id == worker_id and w.is_wanted]
    return found


def test_who_is_wanted_is_to_be_created(workforce: Workforce, said: list[str]) -> None:
    assert said == ["starting workers prefill-0, decode-0"]
    assert [w.actor for w in workforce.workers] == [None, None]
    assert not workforce.all_serve
    assert workforce.serving == workforce.waiting == {}
    report = workforce.describe()
    assert report.num_serving == 0
    assert report.missing == dict.fromkeys(ROLES, "it starts, or waits for a host with room")


def test_all_serve_when_each_has_its_role_and_settings(workforce: Workforce) -> None:
    serve(named(workforce, "prefill-0"), "prefill")
    serve(named(workforce, "decode-0"), "prefill")
    assert not workforce.all_serve
    assert workforce.describe().missing == {"decode-0": "it still has its last settings, or role"}
    serve(named(workforce, "decode-0"), "decode", unregistered="no router has it")
    assert workforce.all_serve
    assert workforce.serving == ROLES
    assert workforce.describe().missing == {"decode-0": "no router has it"}
    serve(named(workforce, "decode-0"), "decode")
    assert workforce.describe().is_complete


def test_of_two_with_one_id_the_current_one_stays(workforce: Workforce) -> None:
    """A supervisor that was ended in the middle of a turnover leaves both."""
    workforce.add_found(ActorName("prefill-0", OLD), "prefill", object(), has_served=True)
    current = workforce.workers[0]
    workforce.workers.reverse()
    workforce.want(workforce.plans)
    assert [w.name.digest for w in workforce.workers if not w.is_wanted] == [OLD]
    assert named(workforce, "prefill-0") is current


def test_who_leaves_for_good_serves_until_it_has_ended(
    settings: Settings, workforce: Workforce
) -> None:
    for worker_id, role in ROLES.items():
        serve(named(workforce, worker_id), role)
    leaving = named(workforce, "decode-0")
    workforce.want(plans(settings, prefill_0="prefill"))
    assert not leaving.is_wanted
    assert workforce.find_next_to_leave({"host"}) is leaving
    leaving.leaving, leaving.serves = object(), False
    assert workforce.serving == ROLES
    assert workforce.present == {"prefill-0": "prefill"}
    assert workforce.find_next_to_leave({"host"}) is None


def test_one_that_is_found_hangs_if_it_has_served(
    workforce: Workforce, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(supervised, "end_actor", lambda name, actor: ended.append(actor))
    for actor, has_served in (("starts", False), ("hangs", True)):
        workforce.add_found(ActorName("decode-7", OLD), "decode", actor, has_served=has_served)
        found = workforce.workers[-1]
        for now_s in range(302):
            found.see_silence(float(now_s), 300.0)
    assert ended == ["hangs"]


def test_those_that_should_stay_come_first(settings: Settings, workforce: Workforce) -> None:
    """These keep their roles: the wanted, then who serves, then who is in its own role."""
    workforce.want(plans(settings, decode_0="decode", decode_1="prefill", prefill_0="prefill"))
    serve(named(workforce, "decode-1"), "prefill")
    serve(named(workforce, "prefill-0"), "prefill")
    workforce.add_found(ActorName("decode-7", OLD), "decode", object(), has_served=True)
    workforce.workers[-1].is_wanted = False
    assert list(workforce.present) == ["prefill-0", "decode-1", "decode-0", "decode-7"]


def test_one_with_other_settings_leaves_once_another_serves(workforce: Workforce) -> None:
    stale = named(workforce, "prefill-0")
    serve(stale, "prefill")
    stale.name = ActorName("prefill-0", OLD)
    assert workforce.find_next_to_leave({"host"}) is stale, "nobody else is to come"
    serve(named(workforce, "decode-0"), "decode")
    assert workforce.find_next_to_leave({"host"}) is stale
    named(workforce, "decode-0").is_awaited = True
    assert workforce.find_next_to_leave({"host"}) is None


def test_why_a_worker_does_not_serve_is_told(workforce: Workforce) -> None:
    worker = named(workforce, "decode-0")
    worker.say("finds no place")
    worker.fault = "it ended"
    assert workforce.waiting == {"decode-0": "finds no place"}
    report = workforce.describe()
    assert report.missing["decode-0"] == "finds no place"
    assert report.ended == ("decode-0",)


def test_others_stay_while_no_router_has_the_one_with_new_settings(workforce: Workforce) -> None:
    stale, fresh = named(workforce, "prefill-0"), named(workforce, "decode-0")
    serve(stale, "prefill")
    stale.name = ActorName("prefill-0", OLD)
    serve(fresh, "decode", unregistered="no router has it")
    assert workforce.find_next_to_leave({"host"}) is None
    serve(fresh, "decode")
    assert workforce.find_next_to_leave({"host"}) is stale
