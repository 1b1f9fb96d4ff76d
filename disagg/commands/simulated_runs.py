"""The runs of `disagg simulate`: one after the other, or several at once in processes."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial

from disagg.commands.signals import exit_on_signals, interrupt_on_signals
from disagg.errors import RemoteFault
from disagg.simulation.comparison import Comparison, Run
from disagg.simulation.figures import Figures
from disagg.simulation.world import Watch, no_watch

PROCESSES_MAX = 1_024
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAY_S = 5.0
"""How often the progress is told."""


def simulate_all(comparison: Comparison, num_processes: int, *, quiet: bool) -> list[Figures]:
    """Figures of all runs, in their order.

    Args:
        comparison: has at least one run.
        num_processes: runs at once; with 1 they are in this process.
        quiet: no progress is told on standard error.

    Raises:
        RemoteFault: a process was ended from outside, as the kernel does where memory is short.
    """
    runs = comparison.runs
    num_processes = min(num_processes, len(runs))
    one = partial(_simulated, comparison, quiet=quiet)
    if num_processes == 1:
        return _collected(map(one, runs), len(runs), quiet=quiet)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, context, _begin, (one,)) as processes:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # nobody is left half begun
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as those have it that are started now
        try:
            begun = [processes.submit(_simulated_here, run) for run in runs]
            interrupt_on_signals()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            return _collected((each.result() for each in begun), len(runs), quiet=quiet)
        except KeyboardInterrupt as interrupted:
            for process in multiprocessing.active_children():
                process.kill()
            os.write(2, b"disagg: interrupted\n")
            raise SystemExit(128 + interrupted.args[0]) from None
        except BrokenProcessPool:
            raise RemoteFault(
                "a process that simulated a fleet was killed; where memory is short, "
                "give fewer --processes"
            ) from None
        finally:
            processes.shutdown(wait=False, cancel_futures=True)
            exit_on_signals()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _collected(found: Iterable[Figures], num_runs: int, *, quiet: bool) -> list[Figures]:
    collected: list[Figures] = []
    pace = _Pace()
    for figures in found:
        collected.append(figures)
        if not quiet and pace.due:
            _say(f"{len(collected)} of {num_runs} runs are done")
    return collected


def _simulated(comparison: Comparison, run: Run, *, quiet: bool) -> Figures:
    return comparison.figures(run, no_watch if quiet else _progress(run))


# One comparison for all runs of a process, which keeps a rate's requests from run to run.
_simulated_of_process: Callable[[Run], Figures]


def _begin(simulated: Callable[[Run], Figures]) -> None:
    global _simulated_of_process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    _end_with_parent()
    _simulated_of_process = simulated


def _simulated_here(run: Run) -> Figures:
    return _simulated_of_process(run)


def _progress(run: Run) -> Watch:
    """Tells now and then how far a run is."""
    plan, pace = run.plan, _Pace()
    name = f"{plan.router.policy} {plan.roles_name} at {run.rate:g}/s"

    def watch(now_ms: float, num_ended: int) -> None:
        if pace.due:
            _say(f"{name}: {now_ms / 1000:.0f} s virtual, {num_ended:,} requests ended")

    return watch


class _Pace:
    """Says when something may be told again."""

    def __init__(self) -> None:
        self._said_s = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether it is some time ago; then it is now that something is told."""
        now_s = time.monotonic()
        due = now_s - self._said_s >= SAY_S
        if due:
            self._said_s = now_s
        return due


def _say(text: str) -> None:
    """Tell the progress where somebody can hear it; no figures are lost where nobody can."""
    with suppress(OSError, ValueError, AttributeError):  # full; closed; None, as without any
        sys.stderr.write(f"{text}\n")  # in one piece, beside other processes'
        sys.stderr.flush()


def _end_with_parent() -> None:
    """Let this process end when the one that began it ends, however that does."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
