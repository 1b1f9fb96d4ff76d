"""What a machine says of itself in files, of a test's own."""

from pathlib import Path


def machine_files(root: Path, files: dict[str, str]) -> Path:
    """Write such files, by their names below a root in place of ``/``; the root."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
