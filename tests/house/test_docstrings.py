"""Docstrings name their subject: none stands for any function, none only repeats the name."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("disagg", "workers", "router", "benchmarks", "demo")
HOLLOW = {
    *("nothing", "nothing besides", "none", "never", "all of them", "the same", "any"),
    *(
        "everything",
        "as it stands",
        "as it stands now",
        "as of now",
        "it happened",
        "it happened now",
    ),
    *("who it is", "who is who", "nobody nowhere", "yes", "no", "see above", "internal"),
}
"""Docstrings without a subject."""


def find_hollow(source: str) -> Iterator[str]:
    """Names of classes and functions whose docstring tells a reader nothing."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words = re.findall(r"\w+", (ast.get_docstring(node) or "").lower().replace("_", " "))
            said = " ".join(word for word in words if word not in ("a", "an", "the"))
            name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", node.name).lower().strip("_")
            if " ".join(words) in HOLLOW or (words and said == name.replace("_", " ")):
                yield node.name


def test_every_docstring_names_its_subject() -> None:
    """Links are not followed: `disagg/workers` and `disagg/router` are looked at once."""
    files = (path for folder in FOLDERS for path in sorted((ROOT / folder).glob("**/*.py")))
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in find_hollow(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_hollow_docstrings_are_found() -> None:
    """Negative control: one of each kind, between good ones."""
    source = "\n".join(
        f"{line}\n    '''{doc}'''"
        for line, doc in [
            ("def match():", "Nothing."),
            ("def blocks():", "All of them."),
            ("async def views():", "As it stands now."),
            ("def block_tables():", "The block tables."),
            ("class LeaseTable:", "A lease table."),
            ("def held():", "Nothing is held after the commit."),
            ("def lease():", "The lease of a generation."),
            ("def undocumented():", ""),
        ]
    )
    assert list(find_hollow(source)) == ["match", "blocks", "views", "block_tables", "LeaseTable"]
