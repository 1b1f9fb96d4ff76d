"""How a command ends: Ctrl-C and SIGTERM while it imports, while it runs, and while it stops.

Who closes the terminal of one that runs says the same by SIGHUP, maybe more than once; nohup has it
ignored.
"""

import os
import signal
from collections.abc import Callable
from types import FrameType


def exit_on_signals() -> None:
    """SIGINT and SIGTERM end the process on the spot, with exit code 130 or 143.

    For as long as nothing was started that would have to be stopped. Raising is no way out of an
    import: some module may catch it.
    """

    def end(signum: int, frame: FrameType | None) -> None:
        os.write(2, b"disagg: interrupted\n")
        os._exit(128 + signum)

    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGTERM, end)


def raise_on_signals() -> None:
    """As Python begins: SIGINT raises KeyboardInterrupt, SIGTERM ends the process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def interrupt_on_signals(again_s: float = 0.0) -> None:
    """SIGTERM, SIGINT and SIGHUP end the main thread's wait; the error says which.

    Args:
        again_s: the error is raised again after so long, until `hurry_on_signals`: what runs just
            then, such as the hooks of a fork, may swallow it. Other signals are ignored until then.
            0: never.
    """

    def interrupt(signum: int, frame: FrameType | None) -> None:
        # A second one that comes before `hurry_on_signals` would cut the stop short.
        if again_s:
            signal.setitimer(signal.ITIMER_REAL, again_s)
            signal.signal(signal.SIGINT, _nothing)
            signal.signal(signal.SIGTERM, _nothing)
        if again_s or signum == signal.SIGHUP:
            _on_hangup(_nothing)
        raise KeyboardInterrupt(signum)

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    if again_s:
        signal.signal(signal.SIGALRM, interrupt)
    _on_hangup(interrupt)


def hurry_on_signals(hurry: Callable[[], None]) -> None:
    """SIGINT and SIGTERM while it stops: nothing is waited for that could be. SIGHUP: no haste.

    Stopping itself is bounded and must not be cut short, or processes would stay behind.
    """

    def on_signal(signum: int, frame: FrameType | None) -> None:
        hurry()

    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    _on_hangup(_nothing)


def _on_hangup(handler: Callable[[int, FrameType | None], None]) -> None:
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, handler)


def _nothing(signum: int, frame: FrameType | None) -> None:
    """It is known."""
