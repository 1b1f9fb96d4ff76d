"""Roles that the fleet is to have: which are missing, and until when all have been there."""

from types import SimpleNamespace

import pytest

from disagg.router.wanted_roles import WantedRoles


def core(*workers):
    """What `WantedRoles` reads of a core with these ready workers, each ``(revision, role)``."""
    fleet = [
        SimpleNamespace(ready=True, info=SimpleNamespace(revision=revision, role=role))
        for revision, role in workers
    ]
    serving = [SimpleNamespace(name=name) for name in sorted({name for name, _ in workers})]
    return SimpleNamespace(fleet=fleet, serving=serving, ready=bool(serving))


@pytest.mark.parametrize(
    ("workers", "missing"),
    [
        ((), ["prefill", "decode"]),
        ((("a", "prefill"),), ["decode"]),
        ((("a", "prefill"), ("a", "decode")), []),
        ((("a", "both"),), []),
        ((("a", "prefill"), ("b", "decode")), ["decode"]),  # no revision has both of them
        ((("a", "prefill"), ("b", "both")), []),
    ],
)
def test_the_most_complete_revision_says_what_is_missing(workers, missing):
    assert WantedRoles(core(*workers), ("prefill", "decode")).missing == missing


def test_all_were_there_until_nobody_is_left():
    known = core(("a", "prefill"))
    roles = WantedRoles(known, ("prefill", "decode"))
    roles.worker_heard()
    assert not roles.were_complete
    known.fleet.append(
        SimpleNamespace(ready=True, info=SimpleNamespace(revision="a", role="decode"))
    )
    assert not roles.were_complete, "nobody has been heard"
    roles.worker_heard()
    assert roles.were_complete
    known.fleet.pop()
    roles.worker_left()
    roles.worker_heard()
    assert roles.were_complete, "the rest serves everybody"
    assert roles.missing == ["decode"]
    known.ready = False
    roles.worker_left()
    assert not roles.were_complete
