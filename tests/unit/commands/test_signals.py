"""What ends a command before it has begun, while Ray starts, and while it runs."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import ray

from disagg.cluster.ray_cluster import _own_signals
from disagg.commands.signals import hurry_on_signals, interrupt_on_signals

IMPORTING = """
import importlib.abc, sys, threading

class Hangs(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "typer":
            print("importing", flush=True)
            while True:  # a wait without end may begin right after the signal, and never hear of it
                threading.Event().wait(0.1)

sys.meta_path.insert(0, Hangs())
from {module} import main
main()
"""


def end_while_it_imports(module: str, number: signal.Signals) -> tuple[int, str]:
    """Exit code and what was said on standard error."""
    program = [sys.executable, "-c", IMPORTING.format(module=module)]
    with subprocess.Popen(
        program,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background has them ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "importing\n"
            process.send_signal(number)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    return process.returncode, said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_imports(number: signal.Signals) -> None:
    code, said = end_while_it_imports("disagg.commands.__main__", number)
    assert (code, said) == (128 + number, "disagg: interrupted\n")


def test_control_without_the_entry_point_it_is_a_traceback() -> None:
    _, said = end_while_it_imports("disagg.commands.main", signal.SIGINT)
    assert "Traceback" in said


def ours(signum: int, frame: FrameType | None) -> None:
    raise AssertionError("not while Ray starts")


def rays(signum: int, frame: FrameType | None) -> None:
    sys.exit(signum)


def start(what_happens: Callable[[], object]) -> None:
    """As Ray does: it sets its handler, then takes seconds."""
    with _own_signals():
        signal.signal(signal.SIGTERM, rays)
        what_happens()


@pytest.fixture
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, ours)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("handler")
def test_sigterm_while_ray_starts_is_an_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt):
        start(lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert signal.getsignal(signal.SIGTERM) is ours


@pytest.mark.usefixtures("handler")
def test_ray_does_not_put_its_own_handler_in_the_place_of_ours() -> None:
    """What it raises may be swallowed as it starts a process, and is not raised again."""
    with _own_signals():
        ray._private.utils.set_sigterm_handler(rays)  # type: ignore[no-untyped-call]
        assert signal.getsignal(signal.SIGTERM) is ours


@pytest.mark.usefixtures("handler")
def test_other_ends_stay_what_they_are_and_the_handler_is_ours_again() -> None:
    with pytest.raises(SystemExit):
        start(lambda: sys.exit(3))
    start(lambda: None)
    assert signal.getsignal(signal.SIGTERM) is ours


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {one: signal.signal(one, signal.SIG_DFL) for one in ENDING}
    yield
    for one, handler in before.items():
        signal.signal(one, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", ENDING)
def test_each_of_them_ends_what_runs_and_says_which(number: signal.Signals) -> None:
    interrupt_on_signals()
    with pytest.raises(KeyboardInterrupt) as raised:
        os.kill(os.getpid(), number)
    assert raised.value.args == (number,)


@pytest.mark.usefixtures("handlers")
def test_the_end_of_the_terminal_is_said_twice_and_interrupts_once() -> None:
    """A shell and the kernel both say it; the second one must not cut short what ends a fleet."""
    interrupt_on_signals()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGHUP)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("handlers")
def test_while_it_stops_the_end_of_the_terminal_is_no_haste() -> None:
    hurried: list[None] = []
    hurry_on_signals(lambda: hurried.append(None))
    os.kill(os.getpid(), signal.SIGHUP)
    assert not hurried
    os.kill(os.getpid(), signal.SIGTERM)
    assert hurried


@pytest.mark.usefixtures("handlers")
def test_under_nohup_it_runs_on() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupt_on_signals()
    hurry_on_signals(lambda: None)
    os.kill(os.getpid(), signal.SIGHUP)


SWALLOWING = """
import os, signal, sys, time
from disagg.commands.signals import hurry_on_signals, interrupt_on_signals
interrupt_on_signals(float(sys.argv[1]))
os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.SIGTERM))
try:
    if os.fork() == 0:
        os._exit(0)
    print("swallowed", flush=True)
    time.sleep(2)
    print("never heard")
except KeyboardInterrupt:
    hurry_on_signals(lambda: None)
    time.sleep(1)  # it is not said again
    print("heard")
"""


@pytest.mark.parametrize(("again_s", "last"), [(0.5, "heard"), (0.0, "never")])
def test_a_signal_that_the_hooks_of_a_fork_swallow_is_heard_all_the_same(
    again_s: float, last: str
) -> None:
    """Ray starts its processes so; `disagg serve` then went on as if there had been no signal."""
    command = [sys.executable, "-c", SWALLOWING, str(again_s)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.split()[:2] == ["swallowed", last], run


PRESSED_AGAIN = """
import signal, sys
from disagg.commands.signals import hurry_on_signals, interrupt_on_signals
again_s = float(sys.argv[1])
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
interrupt_on_signals(again_s)
heard, ending = [], (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
for number in (*ending, signal.SIGALRM) if again_s else ending:
    try:
        signal.raise_signal(number)
    except KeyboardInterrupt:
        heard.append(number.name)
hurry_on_signals(lambda: heard.append("hurry"))
signal.raise_signal(signal.SIGINT)
print(*heard)
"""


@pytest.mark.parametrize(
    ("again_s", "heard"),
    [(60.0, "SIGTERM SIGALRM hurry"), (0.0, "SIGTERM SIGINT SIGTERM SIGHUP hurry")],
)
def test_what_is_raised_again_is_raised_by_no_second_signal(again_s: float, heard: str) -> None:
    """It came as the stop began, cut that short, and left Ray and the keys of the run behind."""
    command = [sys.executable, "-c", PRESSED_AGAIN, str(again_s)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == heard, run


SAYING = """
import sys
from disagg.telemetry.log_stream import LogStream
{say}("to nobody\\n")
print("goes on")
"""


@pytest.mark.parametrize(
    ("say", "goes_on"),
    [("LogStream(sys.stderr).write_line", b"goes on\n"), ("sys.stderr.write", b"")],
)
def test_what_a_fleet_says_may_go_unread(say: str, goes_on: bytes) -> None:
    read, unread = os.pipe()
    os.close(read)
    program = [sys.executable, "-c", SAYING.format(say=say)]
    with open(unread, "wb") as stderr:
        done = subprocess.run(program, stdout=subprocess.PIPE, stderr=stderr, timeout=120)
    assert done.stdout == goes_on
