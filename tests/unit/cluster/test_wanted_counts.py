"""Who says how many workers are wanted: settings, an operator, the load; and when that changes."""

from collections.abc import Mapping

import pytest

from disagg.cluster import wanted_counts
from disagg.cluster.counts import BY_HAND, BY_LOAD, BY_SETTINGS, Counts, Wish
from disagg.cluster.wanted_counts import WantedCounts
from disagg.config import Settings

SETTINGS = Settings.model_validate(
    {"cluster": {"num_prefill": 2, "num_decode": 1, "hash_key": "ab" * 32}}
)
BY_THE_LOAD = SETTINGS.model_copy(
    update={"autoscale": SETTINGS.autoscale.model_copy(update={"prefill": "1-4"})}
)
OWN = Counts(2, 1)


class Watch:
    """Stands for what asks the routers; decides ``counts``, or what is so far."""

    def __init__(self) -> None:
        self.counts: Counts | None = None

    def decide(self, counts: Counts, serving: Mapping[str, str]) -> tuple[Counts, str]:
        return self.counts or counts, f"{len(serving)} serve"


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Wish | None]:
    wishes: list[Wish | None] = []
    monkeypatch.setattr(wanted_counts, "write_wish", wishes.append)
    return wishes


def test_settings_hold_until_an_operator_wants_others(
    said: list[str], written: list[Wish | None]
) -> None:
    wanted = WantedCounts(SETTINGS, said.append)
    assert (wanted.counts, wanted.by) == (OWN, "")
    assert wanted.follow(None, {}), "the first ones are new"
    assert not wanted.follow(None, {})
    assert said == [], "nobody has to be told what the settings say"
    by_hand = Wish(Counts(1, 3), by_hand=True)
    assert wanted.follow(by_hand, {})
    assert (wanted.counts, wanted.by) == (Counts(1, 3), BY_HAND)
    assert not wanted.follow(by_hand, {})
    assert wanted.follow(None, {})
    assert (wanted.counts, wanted.by) == (OWN, BY_SETTINGS)
    assert said == [
        "wanted, by disagg scale: prefill 1, decode 3",
        "wanted, by settings: prefill 2, decode 1",
    ]
    assert written == []


def test_what_the_load_says_is_written_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch, said: list[str], written: list[Wish | None]
) -> None:
    watch = Watch()
    monkeypatch.setattr(wanted_counts, "watch_load", lambda settings: watch)
    wanted = WantedCounts(BY_THE_LOAD, said.append)
    assert wanted.follow(None, {})
    assert (wanted.counts, wanted.by, written) == (OWN, BY_LOAD, [])
    watch.counts = Counts(3, 1)
    assert wanted.follow(None, {"prefill-0": "prefill"})
    assert said[-2:] == ["1 serve", "wanted, by autoscale: prefill 3, decode 1"]
    assert written == [Wish(Counts(3, 1), by_hand=False)]
    watch.counts = None  # it goes on from what was written, also by another supervisor
    assert not wanted.follow(written[0], {})
    watch.counts = Counts(9, 9)
    assert wanted.follow(Wish(OWN, by_hand=True), {})
    assert (wanted.counts, wanted.by) == (OWN, BY_HAND), "the load does not overrule an operator"
    assert len(written) == 1


def test_what_the_load_said_holds_for_roles_with_a_range_alone(
    monkeypatch: pytest.MonkeyPatch, said: list[str], written: list[Wish | None]
) -> None:
    """The settings have had another number of decode workers since it was written."""
    monkeypatch.setattr(wanted_counts, "watch_load", lambda settings: Watch())
    wanted = WantedCounts(BY_THE_LOAD, said.append)
    assert wanted.follow(Wish(Counts(3, 4), by_hand=False), {})
    assert (wanted.counts, wanted.by) == (Counts(3, 1), BY_LOAD)
    assert written == []
