"""What the garbage collector looks through of a process that serves."""

import subprocess
import sys

import pytest

PROGRAM = """
import gc
import os
from disagg.telemetry.garbage_collector import YOUNG_OBJECTS_MAX, spare_garbage_collector

class Ring:
    def __init__(self):
        self.me = self
    def __del__(self):
        print("freed")

gc.disable()  # until then nothing else frees it
Ring()
{call}
print(gc.get_freeze_count() > 1000, gc.get_threshold()[0] == YOUNG_OBJECTS_MAX, flush=True)
os._exit(0)  # the interpreter's own end would free it too
"""


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("spare_garbage_collector()", ["freed", "True", "True"]),
        ("", ["False", "False"]),  # control: who does not ask is not spared
    ],
)
def test_what_starting_made_is_not_looked_through_again(call: str, said: list[str]) -> None:
    program = [sys.executable, "-c", PROGRAM.format(call=call)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert done.stdout.split() == said, done.stderr


WORKER = """
import gc
from disagg.workers.actor import WorkerActor
from disagg.workers.options import WorkerOptions

class Fresh:
    role, routers_of_cluster = "both", None
    def __init__(self, options): pass
    def start(self): print(gc.get_freeze_count() > 1000)
    def wait_failed(self, timeout_s=None): return False

WorkerActor(WorkerOptions("w", "both", "", "m", ()), "__main__:Fresh")
print(gc.get_freeze_count() > 1000, flush=True)
__import__("os")._exit(0)
"""
ROUTER = """
import asyncio, gc, os, signal
from disagg.router import process

class Fresh:
    def __init__(self):
        self.dispatcher = self
        self.broken = asyncio.Event()
    async def start(self, inherited):
        print(gc.get_freeze_count() > 1000)
        asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGTERM)
    async def drain(self): pass
    async def stop(self): print(gc.get_freeze_count() > 1000)

async def serve():
    await process.serve(Fresh())

asyncio.run(serve())
"""


@pytest.mark.parametrize("program", [WORKER, ROUTER], ids=["worker", "router"])
def test_who_serves_is_spared_once_it_has_started(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr
