"""What a step frees stays with the process; each side in a process of its own."""

import subprocess
import sys

import pytest

COUNT = """
import ctypes, resource, sys
import torch
from disagg.workers.engines.freed_memory import M_TRIM_THRESHOLD, keep_freed_memory

PR_SET_THP_DISABLE = 41  # huge pages, where a machine gives them to all, are few faults anyway
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
# Glibc begins so, and moves its bounds with what a process happens to free.
assert ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 128 << 10)
if sys.argv[1] == "kept":
    assert keep_freed_memory()
def step():
    tensors = [torch.ones(2 << 20) for _ in range(4)]  # 8 MiB each
for _ in range(10):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def num_faults(how: str) -> int:
    run = subprocess.run([sys.executable, "-c", COUNT, how], capture_output=True, check=True)
    return int(run.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone has this")
def test_steps_fault_no_pages_in_again() -> None:
    pages = 20 * (32 << 20) // 4096
    assert num_faults("kept") < pages // 100
    assert num_faults("given back") > pages // 2
