"""What an installation puts into site-packages: `disagg` and nothing beside it."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from disagg.router.live_pages import FILES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=120,
    )
    (wheel,) = out.glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_only_disagg_is_at_the_top(wheel_names: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"disagg"}


def test_the_linked_folders_are_inside(wheel_names: list[str]) -> None:
    for name in ("disagg/workers/options.py", "disagg/router/options.py", "disagg/py.typed"):
        assert name in wheel_names
    assert not any("__pycache__" in name or name.endswith(".so") for name in wheel_names)


def test_the_files_of_the_live_page_are_inside(wheel_names: list[str]) -> None:
    for name, _ in FILES.values():
        assert f"disagg/router/live/{name}" in wheel_names


def test_what_others_test_against_is_inside_and_the_explorer_is_not(wheel_names: list[str]) -> None:
    assert "disagg/testing/scripted_worker.py" in wheel_names
    assert not any(name.startswith("disagg/checking") for name in wheel_names)


def test_nothing_inside_imports_what_is_left_out() -> None:
    for path in sorted((ROOT / "disagg").rglob("*.py")):
        if (ROOT / "disagg" / "checking") not in path.parents:
            assert "disagg.checking" not in path.read_text(), path


def test_the_links_are_links() -> None:
    """A checkout without links (some file systems) would install an empty disagg.workers."""
    for name in ("workers", "router"):
        assert (ROOT / "disagg" / name).resolve() == ROOT / name
