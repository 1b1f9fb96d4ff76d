"""How many processes and threads may be started, by control groups and the user's limit."""

import os
import resource
import threading
from pathlib import Path

import pytest

from disagg.cluster import local
from disagg.errors import ConfigError
from disagg.telemetry.task_limits import _num_tasks, tasks_left
from tests.written_files import write_files


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Of the user, who is not root."""
    found = {"soft": resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda _: (found["soft"], found["soft"]))
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    return found


@pytest.mark.parametrize(
    ("group", "folder"), [("0::/pod/box", "pod"), ("7:pids:/pod/box", "pids/pod")]
)
def test_the_tightest_group_counts(
    tmp_path: Path, limit: dict[str, int], group: str, folder: str
) -> None:
    files = {"proc/self/cgroup": f"{group}\n"}
    assert tasks_left(write_files(tmp_path, files)) is None
    top = f"sys/fs/cgroup/{folder}"
    files |= {f"{top}/pids.max": "100\n", f"{top}/pids.current": "90\n"}
    files |= {f"{top}/box/pids.max": "max\n", f"{top}/box/pids.current": "5\n"}
    said = (10, "pids.max of its control group is 100")
    assert tasks_left(write_files(tmp_path, files)) == said
    limit["soft"] = 3
    assert tasks_left(tmp_path) == (3, "ulimit -u is 3, and its user has 0")


def test_threads_of_the_user_count() -> None:
    num_own = _num_tasks(Path("/proc"), os.getuid())
    held = threading.Event()
    threads = [threading.Thread(target=held.wait) for _ in range(50)]
    for thread in threads:
        thread.start()
    try:
        assert _num_tasks(Path("/proc"), os.getuid()) > num_own  # others may end meanwhile
    finally:
        held.set()
        for thread in threads:
            thread.join()


def test_a_fleet_for_which_there_are_too_few_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray hung where it had no more threads, and not even Ctrl-C ended it."""
    monkeypatch.setattr(local, "tasks_left", lambda: (255, "pids.max of its control group is 300"))
    with pytest.raises(ConfigError, match=r"only 255 more .* pids\.max .* 2 workers take 256 "):
        local._refuse_few_tasks(2)
    local._refuse_few_tasks(1)
    monkeypatch.setattr(local, "tasks_left", lambda: None)
    local._refuse_few_tasks(1_000)
