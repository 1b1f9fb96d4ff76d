"""The kernel's control groups of this process: what a container, or a service, is held to."""

from pathlib import Path


def group_folders(root: Path, controller: str) -> list[Path]:
    """Folders of the control groups of this process that have a controller, innermost first."""
    mounted = root / "sys/fs/cgroup"
    found: list[Path] = []
    for line in read_limit(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top = mounted
        elif controller in controllers.split(","):
            top = mounted / controller
        else:
            continue
        inner = top / path.strip("/")
        found += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(top)]
    return found


def read_limit(file: Path) -> str:
    """What a file of a group says; "" where this version, or this level, has no such file."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
