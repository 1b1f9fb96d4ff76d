"""Every file of code, and every folder of it, stands in the README of its folder."""

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("disagg", "workers", "router", "benchmarks", "demo", "tests", "proto", "k8s")
SUFFIXES = {".py", ".proto", ".sh", ".yaml"}
UNNAMED = ("__init__.py", "conftest.py", "test_*.py")
"""Files whose name says what they are; a folder of tests is named as a whole."""
ELSEWHERE = ("disagg/wire/v1/", "tests/data/")
"""Generated, and taken over from elsewhere."""
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)\)")


def find_unnamed(root: Path) -> list[str]:
    """One line for every file and folder that the nearest README above it does not name."""
    files = sorted(path for folder in FOLDERS for path in _files(root / folder))
    paths = {path.relative_to(root) for path in files}
    paths |= {parent for path in paths for parent in path.parents if len(parent.parts) > 1}
    return [
        f"{readme} does not name {path.as_posix()}"
        for path in sorted(paths)
        if not f"{path.as_posix()}/".startswith(ELSEWHERE)
        and not any(fnmatch(path.name, pattern) for pattern in UNNAMED)
        and not _is_named(root, readme := _nearest_readme(root, path), path)
    ]


def _files(folder: Path) -> Iterator[Path]:
    """Code below a folder, without what links lead to."""
    for path in folder.iterdir() if folder.exists() else ():
        if path.is_dir() and not path.is_symlink():
            yield from _files(path)
        elif path.suffix in SUFFIXES:
            yield path


def _nearest_readme(root: Path, path: Path) -> Path:
    above = (parent / "README.md" for parent in path.parents)
    return next((readme for readme in above if (root / readme).exists()), Path("README.md"))


def _is_named(root: Path, readme: Path, path: Path) -> bool:
    """By its path from the README, or by its name in an entry that names the folder it is in."""
    inside = path.relative_to(readme.parent)
    text = (root / readme).read_text() if (root / readme).exists() else ""
    for entry in re.split(r"\n(?=[-|#]|\n)", text):
        words = {word.rstrip("/") for code in CODE.findall(entry) for word in code.split()}
        words |= {target.removesuffix("/README.md") for target in LINK.findall(entry)}
        words = {word.removeprefix(f"{readme.parent.as_posix()}/") for word in words}
        if any(fnmatch(inside.as_posix(), word) for word in words if word != "*.py"):
            return True
        if any(word.startswith(f"{inside.as_posix()}/") for word in words):
            return True  # a folder, by a path through it
        if inside.parent.as_posix() in words and path.name in words:
            return True
    return False


def test_every_file_stands_in_its_readme() -> None:
    assert find_unnamed(ROOT) == []


SOUND = {
    "disagg/README.md": "| `errors.py` | errors |\n| [kv](kv/README.md) | blocks |",
    "disagg/errors.py": "",
    "disagg/__init__.py": "",
    "disagg/kv/README.md": "- `pool.py`: a pool\n- `kinds/`: `full.py`, `window.py`\n- `a/*_b.py`",
    "disagg/kv/pool.py": "",
    "disagg/kv/kinds/full.py": "",
    "disagg/kv/kinds/window.py": "",
    "disagg/kv/a/one_b.py": "",
    "tests/README.md": "`tests/house/` holds the house; `unit/kv`\n",
    "tests/house/test_it.py": "",
}


@pytest.mark.parametrize(
    ("name", "text", "missing"),
    [
        ("disagg/core.py", "", "disagg/README.md does not name disagg/core.py"),
        ("disagg/kv/other.py", "", "disagg/kv/README.md does not name disagg/kv/other.py"),
        # the README of the folder, not one above it
        ("disagg/kv/errors.py", "", "disagg/kv/README.md does not name disagg/kv/errors.py"),
        # in the entry of its own folder
        ("disagg/kv/a/full.py", "", "disagg/kv/README.md does not name disagg/kv/a/full.py"),
        ("disagg/kv/kinds/__main__.py", "", "does not name disagg/kv/kinds/__main__.py"),
        ("tests/house/builders.py", "", "tests/README.md does not name tests/house/builders.py"),
        ("tests/gpu/test_it.py", "", "tests/README.md does not name tests/gpu"),
        ("proto/generate.sh", "", "README.md does not name proto/generate.sh"),
        ("disagg/kv/README.md", "pool.py, `*.py`", "does not name disagg/kv/pool.py"),
        ("tests/unit/kv/test_it.py", "", ""),
        ("disagg/kv/a/two_b.py", "", ""),
    ],
)
def test_a_file_without_an_entry_is_seen(
    tmp_path: Path, name: str, text: str, missing: str
) -> None:
    for file, content in (SOUND | {name: text}).items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(content)
    found = find_unnamed(tmp_path)
    if missing:
        assert any(missing in line for line in found), found
    else:
        assert found == []
