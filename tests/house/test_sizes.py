"""Length of files and names nobody should have to guess behind."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("disagg", "workers", "router", "tests", "benchmarks", "demo", "proto", "k8s", ".ci")
SUFFIXES = {".py", ".sh", ".proto", ".yaml", ".toml", ""}
NUM_LINES_MAX = 400
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "mixin", "mixins"}
EXEMPT = ("disagg/wire/v1/", "tests/data/")
"""Generated code and data taken over from elsewhere."""
EXEMPT_NAMES = {"proto/disagg/wire/v1/common.proto"}
"""Part of the wire contract's published names."""


def find_faults(root: Path) -> list[str]:
    faults: list[str] = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.is_dir() or name.startswith(EXEMPT) or path.suffix not in SUFFIXES:
                continue
            num_lines = len(path.read_text().splitlines())
            if num_lines > NUM_LINES_MAX:
                faults.append(f"{name}: {num_lines} lines, at most {NUM_LINES_MAX}")
            parts = {part for p in name.split("/") for part in Path(p).stem.lower().split("_")}
            if parts & FORBIDDEN_NAMES and name not in EXEMPT_NAMES:
                faults.append(f"{name}: say what is in it")
            if path.suffix == ".py":
                faults += _class_faults(name, path)
                if path.name == "__init__.py":
                    faults += _init_faults(name, path)
    return faults


def _class_faults(name: str, path: Path) -> list[str]:
    return [
        f"{name}:{node.lineno}: no mixins ({node.name})"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and "mixin" in node.name.lower()
    ]


def _init_faults(name: str, path: Path) -> list[str]:
    """An __init__ hands on names: a docstring, imports and __all__, nothing that runs."""
    allowed = (ast.Import, ast.ImportFrom)
    return [
        f"{name}:{node.lineno}: an __init__ only hands on names"
        for node in ast.parse(path.read_text()).body
        if not isinstance(node, allowed)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        and not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__")
    ]


def test_files_are_short_and_named_for_what_they_hold() -> None:
    assert find_faults(ROOT) == []


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("disagg/kv/pool.py", "x = 1\n" * 401, "401 lines"),
        ("workers/long.py", "x = 1\n" * 401, "401 lines"),
        ("disagg/kv/utils.py", "", "say what is in it"),
        ("router/misc/thing.py", "", "say what is in it"),
        ("router/http_helpers.py", "", "say what is in it"),
        ("workers/engines/native/step.py", "class StepMixin: ...\n", "no mixins"),
        ("disagg/kv/__init__.py", "START = compute()\n", "only hands on names"),
    ],
)
def test_a_fault_is_seen(tmp_path: Path, name: str, text: str, reason: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(text)
    found = find_faults(tmp_path)
    assert len(found) == 1
    assert reason in found[0]


def test_generated_and_vendored_files_are_exempt(tmp_path: Path) -> None:
    for name in ("disagg/wire/v1/a_pb2.py", "tests/data/crd.yaml"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("x = 1\n" * 1000)
    assert find_faults(tmp_path) == []
