"""Phases of a start in the log: what each took, and that a long one goes on."""

import logging
import re
import threading
from collections.abc import Iterator

import pytest

from disagg.workers import machine
from disagg.workers.engines.start_phases import phase

MIB = 1 << 20
WAIT_S = 60.0


class Log(logging.Handler):
    """Keeps messages; a wait for one has a bound."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self.grown = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self.grown:
            self.messages.append(record.getMessage())
            self.grown.notify_all()

    def wait(self, num_messages: int) -> None:
        with self.grown:
            assert self.grown.wait_for(lambda: len(self.messages) >= num_messages, WAIT_S)


@pytest.fixture
def log() -> Iterator[Log]:
    handler = Log()
    logger = logging.getLogger("disagg.workers.engines.start_phases")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)  # the attribute alone would leave what the logger remembers of it
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before)


def test_a_phase_says_what_it_took(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([10 * MIB, 14 * MIB])
    monkeypatch.setattr(machine, "used_bytes", lambda _: next(used))
    with phase("weights", "cpu"):
        assert not log.messages
    (message,) = log.messages
    assert re.fullmatch(r"weights: [\d.]+ s, 4 MiB \(14 MiB in use\)", message)


def test_a_long_phase_says_how_far_it_is(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    used = [10 * MIB]
    monkeypatch.setattr(machine, "used_bytes", lambda _: used[0])
    with phase("weights", "cpu", expected_bytes=8 * MIB, progress_s=0.001):
        used[0] = 13 * MIB
        log.wait(1)
        seen = len(log.messages)
        log.wait(seen + 1)
    said = re.compile(r"weights: 3 MiB of about 8 MiB after \d+ s")
    assert any(said.fullmatch(message) for message in log.messages)
    assert log.messages[-1].endswith("3 MiB (13 MiB in use)")


def test_a_phase_that_fails_raises_and_ends_its_reports(log: Log) -> None:
    with pytest.raises(ValueError, match="broken"), phase("weights", "cpu"):
        raise ValueError("broken")
    assert not log.messages
    assert "progress" not in {thread.name for thread in threading.enumerate()}


def test_the_memory_of_this_process_is_known() -> None:
    assert machine.used_bytes("cpu") > MIB
