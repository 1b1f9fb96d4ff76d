"""What a supervisor does while it is in charge, and how it ends."""

from collections.abc import Callable

import pytest

from disagg.cluster import lasting
from disagg.cluster.lasting import LastingSupervision
from disagg.config import Settings


class _Charge:
    def __init__(self, report: object) -> None: ...

    def take(self, see: object, timeout_s: float | None = None) -> None: ...

    def confirm(self) -> None: ...


class _Supervisor:
    """Waits for hosts longer than Ray may be silent."""

    closed = 0

    def __init__(self, *_: object, lasting: bool, confirm: Callable[[], None]) -> None:
        self._confirm = confirm

    def start(self) -> None:
        for _ in range(3):
            self._confirm()
        raise KeyboardInterrupt

    def close(self) -> None:
        _Supervisor.closed += 1


def test_who_waits_for_hosts_is_seen_and_closes_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lasting, "Charge", _Charge)
    monkeypatch.setattr(lasting, "Supervisor", _Supervisor)
    seen: list[None] = []
    supervision = LastingSupervision(Settings(), lambda line: None)
    with pytest.raises(KeyboardInterrupt):
        supervision.run(lambda: seen.append(None), lambda supervisor: None)
    assert len(seen) == 3
    assert _Supervisor.closed == 1
