"""How many processes and threads may still be started here.

Where there are too few, Ray and libraries in C++ end without a word, or wait for ever.
"""

import os
import resource
from pathlib import Path

from disagg.telemetry.control_groups import group_folders, read_limit

_ROOT = Path("/")


def tasks_left(root: Path = _ROOT) -> tuple[int, str] | None:
    """How many, and by which limit; None where there is no limit."""
    found = []
    for folder in group_folders(root, "pids"):
        most, now = read_limit(folder / "pids.max"), read_limit(folder / "pids.current")
        if most.isdigit() and now.isdigit():
            found.append((int(most) - int(now), f"pids.max of its control group is {most}"))
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if limit != resource.RLIM_INFINITY and os.getuid():  # root has no such limit
        num_own = _num_tasks(root / "proc", os.getuid())
        found.append((limit - num_own, f"ulimit -u is {limit}, and its user has {num_own}"))
    return min(found, default=None)


def _num_tasks(proc: Path, uid: int) -> int:
    """Threads of all processes of a user, as far as they are shown."""
    num = 0
    for folder in proc.iterdir():
        try:
            if folder.name.isdigit() and folder.stat().st_uid == uid:
                num += len(os.listdir(folder / "task"))
        except OSError:  # it has ended, or is hidden
            continue
    return num
