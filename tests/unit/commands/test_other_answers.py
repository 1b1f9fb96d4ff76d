"""What is JSON but no router's answer: one line that names who answered, and no traceback."""

from collections.abc import Callable
from typing import Any

import pytest

from disagg.commands import drain, explain, fleet_requests, revisions, status_view
from disagg.commands.fleet_requests import RunningFleet
from disagg.errors import RemoteFault

URL = "http://router"
COMMANDS: dict[tuple[Any, str], Callable[[], object]] = {
    (explain, ""): lambda: explain.explain("r", URL),
    (explain, "json"): lambda: explain.explain("r", URL, as_json=True),
    (status_view, ""): lambda: status_view.fetch(URL, 1),
    (drain, ""): lambda: drain.drain("w", url=URL),
    (fleet_requests, ""): lambda: RunningFleet(URL, "m", URL).wait_until_idle(),
}


@pytest.mark.parametrize("asked", COMMANDS)
@pytest.mark.parametrize("told", [{}, {"generations": "x", "workers": [3], "router": None}])
def test_it_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, asked: tuple[Any, str], told: dict[str, Any]
) -> None:
    monkeypatch.setattr(asked[0], "call_router", lambda *_, **__: told)
    with pytest.raises(RemoteFault, match=f"^{URL} did not answer as a router does: .*$") as found:
        COMMANDS[asked]()
    assert "\n" not in found.value.message


def test_a_number_that_is_too_large_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    one = dict.fromkeys(("name", "model_fingerprint"), "") | {"weight": 10**400}
    monkeypatch.setattr(revisions, "call_router", lambda *_, **__: {"revisions": [one]})
    with pytest.raises(RemoteFault, match=f"^{URL} did not answer as a router does: Overflow"):
        revisions.list_revisions([URL])
