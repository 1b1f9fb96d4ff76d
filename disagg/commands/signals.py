"""How a command ends: Ctrl-C and SIGTERM while it runs, neither while it stops."""

import signal
from types import FrameType


def interrupt_on_signals() -> None:
    """SIGTERM and SIGINT both end the main thread's wait, wherever it is."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)


def ignore_signals() -> None:
    """Stopping is bounded and must not be cut short, or processes would stay behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
