"""Every rule is needed: without it the explorer finds what breaks; and the document says so."""

from dataclasses import replace
from pathlib import Path

import pytest
from disagg.checking.explorer.mutual_world import MutualWorld
from tests.unit.transfer.rules import RULES
from tests.unit.transfer.taken_away import TakenAway, at, document, ending, num_steps

from disagg.checking.explorer.exploration import Exploration
from disagg.checking.explorer.lease_world import LeaseWorld, Setting
from disagg.checking.explorer.worlds import LEASE_SETTINGS, MUTUAL_SETTINGS
from disagg.scheduling.core import WorkerCore
from tests.drawn_tables import check_drawn
from tests.unit.transfer import mutants, mutual_mutants

DOCUMENT = Path(__file__).parents[3] / "docs" / "lease.md"


@pytest.mark.parametrize("row", RULES, ids=lambda row: row.rule)
def test_a_rule_taken_away_breaks(row: TakenAway) -> None:
    seen = row.explore()
    print(f"{row.rule}: {seen}")
    assert seen.problem, str(seen)
    assert (num_steps(seen), ending(seen)) == (row.num_steps, row.ends), str(seen)
    assert str(seen).count("\n") == len(seen.trace), "one readable line per step"


def test_each_rule_has_one_row() -> None:
    assert len({row.rule for row in RULES}) == len(RULES)


def test_the_documents_table_is_this_one() -> None:
    check_drawn(DOCUMENT, "rules", document(RULES))


BORN_AGAIN, READER_AGAIN = (
    LEASE_SETTINGS["lease-owner-restarts"],
    LEASE_SETTINGS["lease-reader-restarts"],
)
COVERED: dict[str, Setting] = {
    "counts in the commit": Setting(leases=mutants.CommitWithoutCountsOwner),
    "counts in the seal, and numbers": Setting(inbound=mutants.CommitWithoutCountsReader),
    "the owner's epoch in an OK": replace(BORN_AGAIN, inbound=mutants.AnySenderAccepted),
    "addressee epochs": replace(READER_AGAIN, checks_addressee=False),
    "the reader's epoch in a commit": replace(
        READER_AGAIN, leases=mutants.AnyReaderAccepted, inbound=mutants.AttemptWithoutEpoch
    ),
}


@pytest.mark.parametrize("name", COVERED)
def test_a_rule_that_others_cover_can_go_alone(name: str) -> None:
    """Why some rows take several rules away together."""
    seen = LeaseWorld(COVERED[name]).explore()
    assert seen.exhausted, str(seen)


def test_the_share_alone_keeps_two_prompts_apart() -> None:
    def mutate(core: WorkerCore) -> None:
        at("kv", mutual_mutants.PromisesOneToken)(core)
        at("batcher", mutual_mutants.PrefillsWaitForBlocks)(core)

    seen = MutualWorld(replace(MUTUAL_SETTINGS["mutual"], mutate=mutate)).explore()
    assert seen.exhausted, str(seen)


def test_how_a_counter_example_is_shown() -> None:
    seen = Exploration(9, 9, False, "KeyError: key(id=1)", ("a", "b: hears Offers(x=(1,), y=2)"))
    assert (num_steps(seen), ending(seen)) == (2, "b: hears Offers: KeyError: key")
    lost = Exploration(9, 9, False, "from here no way leads to a goal", ("a", "b", "c"), 2)
    assert (num_steps(lost), ending(lost)) == (2, "b: nothing leads to a good end any more")
