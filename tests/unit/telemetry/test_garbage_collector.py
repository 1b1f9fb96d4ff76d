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
