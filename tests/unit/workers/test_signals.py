"""A worker's main thread hears of a signal whichever thread the kernel woke for it."""

import subprocess
import sys

import pytest

WAITS = """
import os, signal, sys, threading, time
from disagg.workers.signals import drain_on_signals, wait_and_handle_signals

class Worker:
    ended = threading.Event()
    def drain(self):
        self.ended.set()

drain_on_signals(Worker())

def woken():
    time.sleep(0.5)  # the main thread waits by then; if it does not, the test passes for nothing
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    print("signalled", flush=True)

threading.Thread(target=woken, daemon=True).start()
{wait}
os._exit(0)
"""


def run(wait: str, timeout_s: float) -> int:
    program = WAITS.format(wait=wait)
    return subprocess.run([sys.executable, "-c", program], timeout=timeout_s).returncode


def test_a_signal_that_another_thread_was_woken_for_is_handled() -> None:
    assert run("wait_and_handle_signals(Worker.ended)", 60) == 0


def test_a_wait_without_end_never_hears_of_it() -> None:
    program = [sys.executable, "-c", WAITS.format(wait="Worker.ended.wait()")]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "signalled\n"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(2)
        finally:
            process.kill()


def test_the_time_to_wait_is_kept() -> None:
    assert run("assert not wait_and_handle_signals(threading.Event(), 0.05)", 60) == 0
