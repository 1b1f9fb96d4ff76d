"""A second signal that comes before the stop has begun: nothing of the stop is left out."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from disagg.cluster import keep, router_group, run_folder
from disagg.commands import serve, signals
from disagg.config import Settings

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)


class Running:
    """In the place of what a command keeps running; somebody ends the command as it looks."""

    cannot_start = was_hurried = False

    def __init__(self, *_: object) -> None:
        self.stopped = 0

    def start(self) -> None:
        """Nothing has to be started."""

    def poll(self) -> None:
        signal.raise_signal(signal.SIGTERM)

    def hurry(self) -> None:
        """It ends at once anyway."""

    def stop(self, *_: object) -> None:
        self.stopped += 1


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Running]:
    made = Running()
    monkeypatch.setattr(router_group, "RouterGroup", lambda *_: made)
    monkeypatch.setattr(keep, "Keeper", lambda *_: made)
    monkeypatch.setattr(run_folder, "PARENT", tmp_path)
    monkeypatch.setattr(serve, "router_options", lambda _: None)
    monkeypatch.setattr(serve, "_log_to_stderr", lambda _: None)
    before = {one: signal.getsignal(one) for one in ENDING}
    yield made
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    for one, handler in before.items():
        signal.signal(one, handler)


def in_processes() -> None:
    serve._route_in_processes(Settings.model_validate({"router": {"processes": 2}}))


def beside_ray() -> None:
    serve._keep(Settings(), Settings)


@pytest.mark.parametrize("command", [in_processes, beside_ray])
@pytest.mark.parametrize("gap", [True, False])
def test_it_cuts_nothing_short(
    running: Running,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: Callable[[], None],
    *,
    gap: bool,
) -> None:
    begin = signals.hurry_on_signals

    def presses_again(hurry: Callable[[], None]) -> None:
        signal.raise_signal(signal.SIGINT)
        begin(hurry)

    monkeypatch.setattr(serve, "hurry_on_signals", presses_again)
    if not gap:  # negative control: as if nothing held the second signal back
        monkeypatch.setattr(serve, "_AGAIN_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            command()
    else:
        command()
    assert running.stopped == int(gap)
    if command is in_processes:
        assert bool(os.listdir(tmp_path)) is not gap
