"""What the documents point to exists: links, headings, paths, make targets, settings."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.config import Settings

ROOT = Path(__file__).parents[2]
SKIPPED = {".cache", ".pytest_cache", "node_modules"}
FOLDERS = (
    "benchmarks",
    "demo",
    "disagg",
    "docs",
    "k8s",
    "proto",
    "router",
    "tests",
    "workers",
    ".ci",
)

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(rf"^(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./*-]*$")
TARGET = re.compile(r"\bmake ([a-z][a-z-]*)\b")
SETTING = re.compile(rf"^({'|'.join(Settings.model_fields)})\.([a-z_]+)$")
FILE_ENDINGS = {"log", "md", "proto", "py", "yaml"}
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def find_documents(root: Path) -> list[Path]:
    return sorted(
        path
        for path in root.rglob("*.md")
        if not any(_is_skipped(part) for part in path.relative_to(root).parts)
        and path.resolve() == path
    )


def _is_skipped(part: str) -> bool:
    """Not ours: environments, caches."""
    return part in SKIPPED or part.startswith(".venv")


def find_faults(root: Path) -> list[str]:
    makefile = (root / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    faults: list[str] = []
    for document in find_documents(root):
        name = document.relative_to(root).as_posix()
        text = document.read_text()
        prose = FENCE.sub("", text)
        faults += [f"{name}: {fault}" for fault in _link_faults(document, prose)]
        for code in CODE.findall(prose):
            faults += [f"{name}: {fault}" for fault in _code_faults(root, document, code)]
        said = {target for code in CODE.findall(prose) for target in TARGET.findall(code)}
        fenced = {target for block in FENCE.findall(text) for target in TARGET.findall(block)}
        faults += [f"{name}: no target {target}" for target in sorted((said | fenced) - targets)]
    return faults


def _link_faults(document: Path, prose: str) -> Iterator[str]:
    for link in LINK.findall(prose):
        if re.match(r"[a-z]+:", link):
            continue  # the web is not ours to test
        path, _, heading = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists():
            yield f"link to {link}, which does not exist"
        elif heading and heading not in _headings(target.read_text()):
            yield f"link to {link}: no such heading"


def _headings(text: str) -> set[str]:
    """As GitHub spells them in links."""
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in found}


def _code_faults(root: Path, document: Path, code: str) -> Iterator[str]:
    for word in code.split():
        word = word.partition("::")[0]
        if PATH.match(word) and not any(
            (base / word).exists() or list(base.glob(word)) for base in (root, document.parent)
        ):
            yield f"path {word} does not exist"
    setting = SETTING.match(code)
    if setting and setting[2] not in FILE_ENDINGS:
        section = Settings.model_fields[setting[1]].annotation
        if setting[2] not in getattr(section, "model_fields", {}):
            yield f"setting {code} does not exist"


def test_everything_pointed_to_exists() -> None:
    assert find_faults(ROOT) == []


def test_all_documents_are_read() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in find_documents(ROOT)}
    assert {"README.md", "docs/architecture.md", "disagg/kv/README.md", "router/README.md"} <= names


SOUND = """# A title: here
[there](docs/other.md), [here](#a-title-here), [web](https://example.org/x), `docs/other.md`,
`docs/*.md`, `make test`, `worker.num_blocks`, `router.py`
"""


@pytest.mark.parametrize(
    ("planted", "fault"),
    [
        ("", ""),
        ("[x](docs/gone.md)", "docs/gone.md, which does not exist"),
        ("[x](docs/other.md#gone)", "no such heading"),
        ("`docs/gone.md`", "path docs/gone.md does not exist"),
        ("`docs/gone*.md`", "path docs/gone*.md does not exist"),
        ("`pytest docs/gone.py::test_x -q`", "path docs/gone.py does not exist"),
        ("`make fast`", "no target fast"),
        ("```sh\nmake fast\n```", "no target fast"),
        ("`worker.gone`", "setting worker.gone does not exist"),
    ],
)
def test_a_broken_pointer_is_seen(tmp_path: Path, planted: str, fault: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "other.md").write_text("# Other\n")
    (tmp_path / "Makefile").write_text("test: x\n\ttrue\n")
    (tmp_path / "README.md").write_text(SOUND + planted + "\n")
    faults = find_faults(tmp_path)
    assert (faults == []) if not fault else (len(faults) == 1 and fault in faults[0])
