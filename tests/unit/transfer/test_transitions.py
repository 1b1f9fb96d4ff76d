"""The transition tables, and the document drawn from them."""

from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import InvariantViolation
from disagg.transfer.owner.states import LEASE_TABLE
from disagg.transfer.reader.states import INBOUND_TABLE, LEASE_REQUEST_TABLE
from disagg.transfer.reservation.states import RESERVATION_REQUEST_TABLE, RESERVATION_TABLE
from disagg.transfer.transitions import TransitionTable
from tests.drawn_tables import check_drawn

TABLES: tuple[TransitionTable[Any, Any], ...] = (
    LEASE_TABLE,
    INBOUND_TABLE,
    RESERVATION_TABLE,
    RESERVATION_REQUEST_TABLE,
    LEASE_REQUEST_TABLE,
)
DOCUMENT = Path(__file__).parents[3] / "docs" / "lease.md"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_document_and_table_agree(table: TransitionTable[Any, Any]) -> None:
    check_drawn(DOCUMENT, table.name, table.document())


class Light(StrEnum):
    RED = "red"
    GREEN = "green"


class Press(StrEnum):
    ON = "on"
    OFF = "off"


def test_a_changed_table_no_longer_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(row.state, row.event, row.next, row.does) for row in LEASE_TABLE.rows]
    changed = TransitionTable("lease", rows[:-1], LEASE_TABLE.births)
    monkeypatch.delenv("DISAGG_REWRITE_TABLES", raising=False)
    with pytest.raises(AssertionError, match="table lease, differs"):
        check_drawn(DOCUMENT, "lease", changed.document())


def test_rewriting_changes_one_table_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "a\n<!-- drawn: x -->\nold\n<!-- end -->\n<!-- drawn: y -->\nold\n<!-- end -->\n"
    )
    monkeypatch.setenv("DISAGG_REWRITE_TABLES", "1")
    check_drawn(page, "x", "new\n")
    monkeypatch.delenv("DISAGG_REWRITE_TABLES")
    check_drawn(page, "x", "new\n")
    check_drawn(page, "y", "old\n")
    with pytest.raises(AssertionError, match="no <!-- drawn: z -->"):
        check_drawn(page, "z", "")


def test_moves_without_a_row_raise() -> None:
    table = TransitionTable("lamp", [(Light.RED, Press.ON, Light.GREEN, "glow")])
    assert table.move(Light.RED, Press.ON) is Light.GREEN
    assert not table.allows(Light.GREEN, Press.ON)
    with pytest.raises(InvariantViolation, match="lamp: on is impossible when green"):
        table.move(Light.GREEN, Press.ON)
    with pytest.raises(InvariantViolation):
        table.leave(Light.RED, Press.ON)
    twice = [(Light.RED, Press.ON, Light.GREEN, ""), (Light.RED, Press.ON, None, "")]
    with pytest.raises(InvariantViolation):
        TransitionTable("lamp", twice)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_state_is_reached_and_left(table: TransitionTable[Any, Any]) -> None:
    kind: type[StrEnum] = type(table.rows[0].state)
    states = set(kind)
    births = {state for _, state, _ in table.births} or {table.rows[0].state}
    reached = births | {row.next for row in table.rows if row.next}
    assert reached == states
    assert {row.state for row in table.rows} == states
