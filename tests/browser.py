"""A real browser for tests of pages: Chromium, driven by Playwright; where there is none, why."""

import shutil
from importlib.util import find_spec
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATH = next((path for path in map(shutil.which, NAMES) if path), "")


def why_none() -> str:
    """Why no browser can be started here; "" if one can."""
    if not PATH:
        return "needs Chromium (Debian: apt-get install chromium)"
    if find_spec("playwright") is None:
        return "needs playwright (pip install playwright)"
    return ""


def launch_arguments() -> dict[str, Any]:
    """For ``playwright.chromium.launch``: nothing is downloaded, nothing is called outside."""
    return {
        "executable_path": PATH,
        # Tests may run as root in a container, where Chromium's own sandbox does not start.
        "args": ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
    }
