"""Who is in charge: claims, and when one who waits may claim."""

from dataclasses import replace

import pytest

from disagg.cluster.claims import SILENT_S, Claim, Standby

CLAIM = Claim(3, "a", "h1, pid 7", "01000000")


def test_what_is_kept_is_read_again() -> None:
    for claim in (CLAIM, CLAIM.renewed().renewed(), CLAIM.given_back()):
        assert Claim.from_bytes(3, claim.to_bytes()) == claim


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"not json", b'{"holder": 1}'])
def test_what_cannot_be_read_is_somebody_elses_until_it_falls_silent(data: bytes) -> None:
    claim = Claim.from_bytes(3, data)
    assert claim.generation == 3
    standby = Standby()
    assert not standby.may_claim(claim, 0.0, has_ended=False)
    assert wait(standby, claim, 0.0, SILENT_S + 1)


def wait(standby: Standby, claim: Claim, from_s: float, to_s: float) -> bool:
    """Look once a second; whether it may claim at last."""
    found = False
    now_s = from_s
    while now_s < to_s:
        now_s += 1.0
        found = standby.may_claim(claim, now_s, has_ended=False)
    return found


def test_nobody_or_somebody_who_ended_is_followed_at_once() -> None:
    assert Standby().may_claim(None, 0.0, has_ended=False)
    assert Standby().may_claim(CLAIM.given_back(), 0.0, has_ended=False)
    assert Standby().may_claim(CLAIM, 0.0, has_ended=True)
    assert not Standby().may_claim(CLAIM, 0.0, has_ended=False)


def test_who_renews_stays_and_who_does_not_is_followed() -> None:
    standby, claim = Standby(), CLAIM
    for now_s in range(100):
        claim = claim.renewed()
        assert not standby.may_claim(claim, float(now_s), has_ended=False)
    assert not wait(standby, claim, 99.0, 99.0 + SILENT_S - 1)
    assert standby.may_claim(claim, 99.0 + SILENT_S, has_ended=False)


def test_who_stood_still_itself_or_had_no_head_to_ask_has_seen_nothing() -> None:
    standby = Standby()
    assert not standby.may_claim(CLAIM, 0.0, has_ended=False)
    assert not standby.may_claim(CLAIM, 10 * SILENT_S, has_ended=False)
    assert not standby.may_claim(CLAIM.renewed(), 10 * SILENT_S + 1, has_ended=False)
    # Another holder's claim begins anew as well.
    other = replace(CLAIM, generation=4, holder="b")
    assert not wait(standby, other, 10 * SILENT_S + 1, 11 * SILENT_S)
