"""Every rule is needed: without it the explorer finds what breaks; and the document says so."""

from pathlib import Path

import pytest

from disagg.checking.explorer.exploration import Exploration
from disagg.checking.explorer.setting import Setting
from disagg.checking.explorer.world import World
from tests.drawn_tables import check_drawn
from tests.unit.checking import lease_mutants, planning_mutants, waiting_mutants
from tests.unit.checking.rules import RULES
from tests.unit.checking.taken_away import (
    TakenAway,
    document,
    ending,
    mutated,
    num_steps,
)

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


COVERED: dict[str, Setting] = {
    "counts in the commit": mutated("lease", {"leases": lease_mutants.CommitWithoutCountsOwner}),
    "counts in the seal, and numbers": mutated(
        "lease", {"inbound": lease_mutants.CommitWithoutCountsReader}
    ),
    "the owner's epoch in a confirmation": mutated(
        "lease-owner-restarts", {"inbound": lease_mutants.AnySenderAccepted}
    ),
    "addressee epochs": mutated("lease-reader-restarts", checks_addressee=False),
    "the reader's epoch in a commit": mutated(
        "lease-reader-restarts",
        {"leases": lease_mutants.AnyReaderAccepted, "inbound": lease_mutants.AttemptWithoutEpoch},
    ),
    "own blocks for the whole prompt, beside the share": mutated(
        "mutual",
        {
            "kv": waiting_mutants.PromisesOneToken,
            "batcher": waiting_mutants.PrefillsWaitForBlocks,
        },
    ),
    "gaps are seen": mutated("generation-prefill-crash", planner=planning_mutants.SeesNoGaps),
    "token 0 is sent again": mutated(
        "generation-prefill-crash", {"decode_side": planning_mutants.SendsToken0Once}
    ),
    "early tokens are dropped": mutated(
        "generation-decode-crash",
        planner=planning_mutants.WithEarlyTokens,
        requests=(Setting().requests[0],),
        returns=False,
        delivery="in order",
        whole_reads=True,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COVERED)
def test_a_rule_that_others_cover_can_go_alone(name: str) -> None:
    """Why some rows take several rules away together."""
    seen = World(COVERED[name]).explore()
    assert seen.exhausted, str(seen)


def test_how_a_counter_example_is_shown() -> None:
    seen = Exploration(9, 9, False, "KeyError: key(id=1)", ("a", "b: hears Offers(x=(1,), y=2)"))
    assert (num_steps(seen), ending(seen)) == (2, "b: hears Offers: KeyError: key")
    lost = Exploration(9, 9, False, "from here no way leads to a good end", ("a", "b", "c"), 2)
    assert (num_steps(lost), ending(lost)) == (2, "b: nothing leads to a good end any more")
