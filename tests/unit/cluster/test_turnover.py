"""Which worker leaves next when settings or counts have changed."""

from dataclasses import replace

from disagg.cluster.turnover import Standing, find_next_to_leave


def stale(name: str) -> Standing:
    return Standing(name, is_current=False)


def test_nobody_leaves_who_is_wanted_with_the_settings_as_they_are() -> None:
    assert find_next_to_leave([Standing("a"), Standing("b")]) is None
    assert find_next_to_leave([]) is None


def test_those_with_old_settings_leave_one_at_a_time() -> None:
    fleet = [Standing("a"), stale("b"), stale("c")]
    assert find_next_to_leave(fleet) == "b"
    drains = replace(fleet[1], is_leaving=True, serves=False)
    assert find_next_to_leave([fleet[0], drains, fleet[2]]) is None
    starts = Standing("b2", serves=False, is_awaited=True)
    assert find_next_to_leave([fleet[0], starts, fleet[2]]) is None
    assert find_next_to_leave([fleet[0], Standing("b2"), fleet[2]]) == "c"


def test_a_bad_setting_costs_one_worker() -> None:
    never_serves = Standing("a2", serves=False, is_awaited=True)
    assert find_next_to_leave([never_serves, stale("b"), stale("c")]) is None


def test_who_does_not_serve_is_replaced_at_once() -> None:
    down = replace(stale("b"), serves=False)
    drains = replace(stale("a"), is_leaving=True, serves=False)
    assert find_next_to_leave([drains, down, stale("c")]) == "b"


def test_a_worker_that_never_found_a_place_holds_nobody_up() -> None:
    unplaced = Standing("new", serves=False, has_place=False)
    assert find_next_to_leave([unplaced, stale("a"), Standing("b")]) == "a"


def test_the_last_one_that_serves_waits_for_another_that_is_to_come() -> None:
    surplus = Standing("prefill-0", is_wanted=False)
    successor = Standing("both-0", serves=False)
    assert find_next_to_leave([surplus, successor]) is None
    assert find_next_to_leave([surplus, replace(successor, serves=True)]) == "prefill-0"
    # It waits for the room that the last one holds.
    assert find_next_to_leave([surplus, replace(successor, has_place=False)]) == "prefill-0"
    assert find_next_to_leave([stale("both-0")]) == "both-0"


def test_a_setting_with_which_no_router_takes_a_worker_costs_one() -> None:
    """A router's address with a mistake in it, another secret: the process serves all the same."""
    unknown = Standing("a2", is_known=False)
    assert find_next_to_leave([unknown, stale("b"), stale("c")]) is None
    assert find_next_to_leave([replace(unknown, is_known=True), stale("b"), stale("c")]) == "b"
    # Back, or on to a third one: the one that nobody knows first.
    undone = replace(unknown, is_current=False)
    assert find_next_to_leave([stale("b"), undone, stale("c")]) == "a2"
    assert find_next_to_leave([Standing("b"), undone]) == "a2"
