"""Several requests that make one up are let in together, or not at all."""

from dataclasses import replace

import pytest

from disagg.errors import CapacityError
from disagg.routing.actions import Fail, NewRequest
from tests.unit.routing.builders import request
from tests.unit.routing.test_admission import Fleet


def group(name: str, number: int, num_following: int = 0, tenant: str = "") -> NewRequest:
    return replace(request(name, tenant=tenant), group=number, num_following=num_following)


def test_a_group_has_its_places_when_its_first_request_is_in() -> None:
    fleet = Fleet("both", requests_max=5)
    fleet.generate(group("a0", 1, num_following=2))
    fleet.ask("x", "y")
    with pytest.raises(CapacityError):
        fleet.ask("z")  # three live, two places are kept
    with pytest.raises(CapacityError):
        fleet.generate(group("b0", 2))  # another group's
    fleet.generate(group("a1", 1))
    fleet.finish("a0")  # the places stay when the first request has ended
    with pytest.raises(CapacityError):
        fleet.ask("z", "zz")
    fleet.generate(group("a2", 1))
    assert fleet.core.num_live == 5
    with pytest.raises(CapacityError):
        fleet.generate(group("a3", 1))  # it has had all of them


def test_places_that_nobody_comes_for_are_free_again() -> None:
    fleet = Fleet("both", requests_max=3)
    fleet.generate(group("a0", 1, num_following=2))
    with pytest.raises(CapacityError):
        fleet.ask("x")
    fleet.core.free_places(1)
    fleet.ask("x", "y")
    fleet.core.free_places(1)
    assert fleet.core.num_live == 3


def test_a_group_is_let_in_whole_or_not_at_all() -> None:
    """A flood gives as many places up as the group needs, but never more than would be fair."""
    fleet = Fleet("both", requests_max=10)
    fleet.ask(*(f"flood{n}" for n in range(10)), tenant="a")
    for num_following in (5, 9):
        with pytest.raises(CapacityError):
            fleet.generate(group("b0", 1, num_following, tenant="b"))
        assert fleet.core.num_live == 10
    fleet.generate(group("b0", 1, num_following=2, tenant="b"))
    failed = [one.error.request_id for one in fleet.actions if isinstance(one, Fail)]
    assert failed == ["flood9", "flood8", "flood7"]
    assert fleet.core.num_live == 8
    for number in (1, 2):
        fleet.generate(group(f"b{number}", 1, tenant="b"))
    assert fleet.core.num_live == 10


@pytest.mark.parametrize(("tenant", "most"), [("a", 30), ("", 32)])
def test_what_runs_leaves_some_places_to_other_tenants(tenant: str, most: int) -> None:
    """It has nothing that it could give up; without tenants all are one."""
    fleet = Fleet("both", requests_max=32, max_sequences=100)
    fleet.ask(*(f"flood{n}" for n in range(most)), tenant=tenant)
    assert len(fleet.running) == most
    with pytest.raises(CapacityError, match=r"\(limits.requests_max\)") as refused:
        fleet.ask("more", tenant=tenant)
    assert refused.value.retry_after_s
    if tenant:
        fleet.ask("polite0", "polite1", tenant="b")
        fleet.finish("flood0")
        fleet.ask("again", tenant=tenant)


def test_places_that_are_kept_count_as_well() -> None:
    fleet = Fleet("both", requests_max=32, max_sequences=100)
    fleet.generate(group("a0", 1, num_following=20, tenant="a"))
    with pytest.raises(CapacityError, match="one may have 30"):
        fleet.generate(group("b0", 2, num_following=9, tenant="a"))
    fleet.generate(group("c0", 3, num_following=8, tenant="a"))
    with pytest.raises(CapacityError, match="tenant a has 30 requests"):
        fleet.ask("more", tenant="a")
    fleet.core.free_places(3)
    fleet.ask("more", tenant="a")


def test_a_group_that_is_larger_than_the_part_of_one_is_let_in_alone() -> None:
    fleet = Fleet("both", requests_max=32, max_sequences=100)
    fleet.generate(group("a0", 1, num_following=31, tenant="a"))
    assert fleet.core.num_live == 1
    with pytest.raises(CapacityError):
        fleet.generate(group("b0", 2, num_following=1, tenant="b"))
