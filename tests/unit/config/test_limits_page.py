"""The table of limits in the documents is the settings themselves."""

import ast
from pathlib import Path

from disagg.config import router_settings
from disagg.config.router_settings import LimitSettings
from tests.drawn_tables import check_drawn

ROOT = Path(__file__).parents[3]


def descriptions() -> dict[str, str]:
    """What the code says below each field, by name."""
    tree = ast.parse(Path(router_settings.__file__).read_text())
    section = next(
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == LimitSettings.__name__
    )
    found: dict[str, str] = {}
    for field, said in zip(section.body, section.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(said, ast.Expr)
            and isinstance(said.value, ast.Constant)
        ):
            found[field.target.id] = " ".join(str(said.value.value).split())
    return found


def test_the_documents_table_is_the_settings() -> None:
    said = descriptions()
    assert set(said) == set(LimitSettings.model_fields)  # each has a description
    defaults = LimitSettings().model_dump()
    rows = [
        f"| `limits.{name}` | {value if value != () else 'none'} | {said[name]} |\n"
        for name, value in defaults.items()
    ]
    table = "| setting | default | what |\n|---|---|---|\n" + "".join(rows)
    check_drawn(ROOT / "docs" / "limits.md", "limits", table)
