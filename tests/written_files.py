"""Folders of small files, as tests want them."""

from pathlib import Path


def write_files(root: Path, files: dict[str, str]) -> Path:
    """Write texts, by their names below a root; the root."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
