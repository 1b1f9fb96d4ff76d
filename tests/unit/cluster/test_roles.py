"""Workers take the roles that are wanted, and as few as can be notice."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.cluster.counts import COUNT_MAX, Counts, Fleet, Wish
from disagg.cluster.roles import assign_roles, own_role
from disagg.config import Settings
from disagg.errors import ConfigError

ROLES = ("prefill", "decode", "both")


def test_without_workers_they_are_numbered() -> None:
    assert assign_roles(Counts(2, 1, 1)) == {
        "prefill-0": "prefill",
        "prefill-1": "prefill",
        "decode-0": "decode",
        "both-0": "both",
    }


def test_one_too_many_takes_what_is_missing() -> None:
    present = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
    changed = assign_roles(Counts(2, 1), present)
    assert changed == present | {"decode-1": "prefill"}
    # A new one beside it gets another id, and back it is what it was.
    assert assign_roles(Counts(2, 2), changed) == changed | {"decode-2": "decode"}
    assert assign_roles(Counts(1, 2), changed) == present


def test_bound_to_hosts_of_their_role_they_come_and_go() -> None:
    present = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
    found = assign_roles(Counts(2, 1), present, may_change=False)
    assert found == {"prefill-0": "prefill", "decode-0": "decode", "prefill-1": "prefill"}


@st.composite
def fleets(draw: st.DrawFn) -> dict[str, str]:
    ids = [f"{role}-{number}" for role in ROLES for number in range(4)]
    return {one: draw(st.sampled_from(ROLES)) for one in draw(st.lists(st.sampled_from(ids)))}


@given(fleets(), st.tuples(*[st.integers(0, 5)] * 3).filter(any), st.booleans())
def test_counts_are_met_and_nobody_moves_without_need(
    present: dict[str, str], wanted: tuple[int, int, int], may_change: bool
) -> None:
    counts = Counts(*wanted)
    found = assign_roles(counts, present, may_change=may_change)
    assert {role: [*found.values()].count(role) for role in ROLES} == counts.by_role
    kept = [one for one, role in present.items() if found.get(one) == role]
    had = {role: [*present.values()].count(role) for role in ROLES}
    assert len(kept) == sum(min(had[role], counts.by_role[role]) for role in ROLES)
    num_new = len(found.keys() - present.keys())
    if may_change:  # nobody is new while another one leaves
        assert num_new == max(0, len(found) - len(present))
    assert assign_roles(counts, found) == found, "what is as wanted stays"


@pytest.mark.parametrize(
    ("counts", "named"),
    [((0, 0, 0), "at least one"), ((-1, 1, 0), "prefill"), ((1, COUNT_MAX + 1, 0), "decode")],
)
def test_counts_that_cannot_be_are_refused(counts: tuple[int, int, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Counts(*counts)


def test_what_is_kept_in_the_cluster_is_read_back() -> None:
    wish = Wish(Counts(2, 0, 1), by_hand=True)
    assert Wish.from_bytes(wish.to_bytes()) == wish
    fleet = Fleet(Counts(1, 1), "settings", {"decode-0": "prefill"}, {"decode-0": "decode"})
    assert Fleet.from_bytes(fleet.to_bytes()) == fleet
    assert not fleet.is_complete
    waiting = replace(fleet, waiting={"decode-0": "finds no place"})
    assert Fleet.from_bytes(waiting.to_bytes()) == waiting
    assert waiting.describe().endswith("decode-0 takes the role prefill: finds no place")
    assert fleet.describe().endswith("decode-0 takes the role prefill")
    of_older = json.loads(fleet.to_bytes())
    del of_older["waiting"]
    assert Fleet.from_bytes(json.dumps(of_older).encode()) == fleet
    for other in (b"", b"[]", b"{}", b'{"counts": {"prefill": 0, "decode": 0, "both": 0}}'):
        with pytest.raises(ConfigError):
            Wish.from_bytes(other)
        with pytest.raises(ConfigError):
            Fleet.from_bytes(other)


def test_counts_go_into_settings_and_nothing_else() -> None:
    settings = Settings()
    changed = Counts(3, 2, 1).into(settings)
    assert Counts.of_settings(changed) == Counts(3, 2, 1)
    assert Counts.of_settings(settings).into(changed) == settings


def test_a_prefix_comes_before_new_ids_and_leaves_their_role_readable() -> None:
    first = assign_roles(Counts(1, 1), prefix="disagg-x7k2p")
    assert first == {"disagg-x7k2p-prefill-0": "prefill", "disagg-x7k2p-decode-0": "decode"}
    assert [own_role(one) for one in first] == ["prefill", "decode"]
    more = assign_roles(Counts(1, 2), first, prefix="disagg-x7k2p")
    assert more == first | {"disagg-x7k2p-decode-1": "decode"}
    # With another prefix all are others: of an id that a second fleet has as well.
    assert assign_roles(Counts(1, 1), more, prefix="b") == {
        "b-prefill-0": "prefill",
        "b-decode-0": "decode",
    }
    assert assign_roles(Counts(1, 1), more).keys() == {"prefill-0", "decode-0"}
