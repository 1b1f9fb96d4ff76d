"""The files that `make test` begins with are there; a renamed one would begin last, unseen."""

from types import SimpleNamespace
from typing import Any, cast

from tests import longest_first


def test_every_file_is_there() -> None:
    assert longest_first.missing() == []
    assert longest_first.missing(["unit/test_gone.py"]) == ["unit/test_gone.py"]


def test_they_come_first_and_all_else_keeps_its_order() -> None:
    names = ["unit/a.py", longest_first.LONGEST[1], "unit/b.py", longest_first.LONGEST[0]]
    items = [SimpleNamespace(path=longest_first.ROOT / name, n=n) for name in names for n in (1, 2)]
    longest_first.sort(cast(Any, items))
    found = [(item.path.relative_to(longest_first.ROOT).as_posix(), item.n) for item in items]
    order = [longest_first.LONGEST[0], longest_first.LONGEST[1], "unit/a.py", "unit/b.py"]
    assert found == [(name, n) for name in order for n in (1, 2)]
