"""Which workers are wanted, who serves and why others do not; without Ray."""

from pathlib import Path

import pytest

from disagg.cluster.roster import Roster
from disagg.cluster.supervised import Supervised
from disagg.cluster.worker_actors import ActorName
from disagg.cluster.worker_plans import WorkerPlans
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
def roster(settings: Settings, said: list[str]) -> Roster:
    roster = Roster(WorkerPlans(settings, WORKER_PATH, ROLES), said.append, 60.0)
    roster.want(roster.plans)
    return roster


def plans(settings: Settings, **roles: str) -> WorkerPlans:
    given = {name.replace("_", "-"): role for name, role in roles.items()}
    return WorkerPlans(settings, WORKER_PATH, given)


def serve(worker: Supervised, role: str, unregistered: str = "") -> None:
    worker.actor, worker.serves, worker.node_id = object(), True, "host"
    worker.state = WorkerState(
        worker.worker_id, role, "e", "a:1", "host", 1, "", "", unregistered=unregistered
    )


def named(roster: Roster, worker_id: str) -> Supervised:
    (found,) = [w for w in roster.workers if w.worker_id == worker_id and w.is_wanted]
    return found


def test_who_is_wanted_is_to_be_created(roster: Roster, said: list[str]) -> None:
    assert said == ["starting workers prefill-0, decode-0"]
    assert [w.actor for w in roster.workers] == [None, None]
    assert not roster.all_serve
    assert roster.serving == roster.waiting == {}
    report = roster.describe()
    assert report.num_serving == 0
    assert report.missing == dict.fromkeys(ROLES, "it starts, or waits for a host with room")


def test_all_serve_when_each_has_its_role_and_settings(roster: Roster) -> None:
    serve(named(roster, "prefill-0"), "prefill")
    serve(named(roster, "decode-0"), "prefill")
    assert not roster.all_serve
    assert roster.describe().missing == {"decode-0": "it still has its last settings, or role"}
    serve(named(roster, "decode-0"), "decode", unregistered="no router has it")
    assert roster.all_serve
    assert roster.serving == ROLES
    assert roster.describe().missing == {"decode-0": "no router has it"}
    serve(named(roster, "decode-0"), "decode")
    assert roster.describe().is_complete


def test_of_two_with_one_id_the_current_one_stays(roster: Roster) -> None:
    """A supervisor that was ended in the middle of a turnover leaves both."""
    roster.add_found(ActorName("prefill-0", OLD), "prefill", object())
    current = roster.workers[0]
    roster.workers.reverse()
    roster.want(roster.plans)
    assert [w.name.digest for w in roster.workers if not w.is_wanted] == [OLD]
    assert named(roster, "prefill-0") is current


def test_who_leaves_for_good_serves_until_it_has_ended(settings: Settings, roster: Roster) -> None:
    for worker_id, role in ROLES.items():
        serve(named(roster, worker_id), role)
    leaving = named(roster, "decode-0")
    roster.want(plans(settings, prefill_0="prefill"))
    assert not leaving.is_wanted
    assert roster.find_next_to_leave({"host"}) is leaving
    leaving.leaving, leaving.serves = object(), False
    assert roster.serving == ROLES
    assert roster.present == {"prefill-0": "prefill"}
    assert roster.find_next_to_leave({"host"}) is None


def test_those_that_should_stay_come_first(settings: Settings, roster: Roster) -> None:
    """These keep their roles: the wanted, then who serves, then who is in its own role."""
    roster.want(plans(settings, decode_0="decode", decode_1="prefill", prefill_0="prefill"))
    serve(named(roster, "decode-1"), "prefill")
    serve(named(roster, "prefill-0"), "prefill")
    roster.add_found(ActorName("decode-7", OLD), "decode", object())
    roster.workers[-1].is_wanted = False
    assert list(roster.present) == ["prefill-0", "decode-1", "decode-0", "decode-7"]


def test_one_with_other_settings_leaves_once_another_serves(roster: Roster) -> None:
    stale = named(roster, "prefill-0")
    serve(stale, "prefill")
    stale.name = ActorName("prefill-0", OLD)
    assert roster.find_next_to_leave({"host"}) is stale, "nobody else is to come"
    serve(named(roster, "decode-0"), "decode")
    assert roster.find_next_to_leave({"host"}) is stale
    named(roster, "decode-0").is_awaited = True
    assert roster.find_next_to_leave({"host"}) is None


def test_why_a_worker_does_not_serve_is_told(roster: Roster) -> None:
    worker = named(roster, "decode-0")
    worker.say("finds no place")
    worker.fault = "it ended"
    assert roster.waiting == {"decode-0": "finds no place"}
    report = roster.describe()
    assert report.missing["decode-0"] == "finds no place"
    assert report.ended == ("decode-0",)
