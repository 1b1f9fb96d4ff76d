"""A worker that others cannot read from looks at its own transport, but not all the time."""

from typing import Any, cast

import pytest
from opentelemetry.trace import NoOpTracer

from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import AskLease, Ended, Offers, WithdrawLease
from disagg.scheduling.actions import CheckTransport
from disagg.transfer.actions import Send
from disagg.workers.control import Control
from disagg.workers.own_transport import CHECKS
from disagg.workers.request_trace import RequestTrace
from tests.unit.workers.test_sessions import new_core

READER = Incarnation("reader", "R")
KEY = RequestKey("one", 1)
FAULTS = ("read_failed", "read_stuck")
OTHER_ENDS = ("", "cancelled", "lease_dead", "commit_refused", "peer_lost", "read_failed ")


@pytest.mark.parametrize("reason", FAULTS)
def test_an_owner_that_hears_of_failed_reads_looks_at_itself(reason: str) -> None:
    core = new_core()
    for message in (Ended(KEY, reason), WithdrawLease(KEY, 1, reason)):
        actions = core.on_peer_message(0, READER, message)
        assert [type(action) for action in actions] == [CheckTransport]


@pytest.mark.parametrize("reason", OTHER_ENDS)
def test_other_ends_are_no_reason_to(reason: str) -> None:
    core = new_core()
    for message in (Ended(KEY, reason), WithdrawLease(KEY, 1, reason)):
        assert core.on_peer_message(0, READER, message) == []


def test_a_reader_that_is_lost_while_it_has_a_lease_is_a_reason() -> None:
    core = new_core()
    assert core.on_peer_lost(0, READER) == []
    core.leases.open(0, KEY, READER, core.prefill_side, (0,))
    doubts = [one for one in core.on_peer_lost(0, READER) if isinstance(one, CheckTransport)]
    assert len(doubts) == 1
    assert core.on_peer_lost(0, READER) == []  # it has none any more


class Waiting:
    """Whoever requested a lease."""

    def lease_granted(self, now_ms: int, owner: Incarnation, offers: Offers) -> None: ...

    def lease_refused(self, now_ms: int, key: RequestKey, cause: str, message: str) -> None: ...


@pytest.mark.parametrize("reason", [*FAULTS, *OTHER_ENDS])
def test_a_pull_that_is_given_up_tells_of_reads_that_failed_alone(reason: str) -> None:
    core = new_core()
    core.lease_requests.ask(0, READER, AskLease(KEY, 0, 1, 0, (), (0,)), Waiting())
    core.on_peer_message(0, READER, Offers(KEY, 7, 0, request_number=1))
    core.lease_requests.give_up(KEY, reason)
    (send,) = core._out.take()
    assert isinstance(send, Send)
    assert send.message == WithdrawLease(KEY, 1, reason if reason in FAULTS else "")


class CountedChecks:
    """A transport that is well."""

    failure = ""
    num_checks = 0

    def check(self) -> None:
        self.num_checks += 1


def test_however_much_is_doubted_it_looks_seldom() -> None:
    transport = CountedChecks()
    trace = RequestTrace(NoOpTracer())
    control = Control(new_core(), cast(Any, None), cast(Any, transport), pytest.fail, trace)
    performer = control._performer
    performer.links = cast(Any, object())
    own = control._transport
    own.check()
    assert transport.num_checks == 0  # nothing is in doubt
    for _ in range(100):
        performer.perform([CheckTransport("told")])
        own.check()
    assert transport.num_checks == 1
    for _ in range(100):  # as if a second went by each time
        own._check_due_s = 0.0
        own.check()
    assert transport.num_checks == 1 + CHECKS  # after the last doubt
