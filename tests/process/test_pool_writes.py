"""What docs/security.md says of registered pools: whoever has the metadata writes.

If the WRITE is refused one day, NIXL can protect pools: use that, and say so there.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.harness import ROOT, WAIT_S

pytestmark = pytest.mark.timeout(300)

COMMON = """
import pickle, sys, time
import numpy as np
from disagg.workers.nixl_agent import NixlAgent
from disagg.workers.pool_region import PoolRegion
def agent_of(name, memory):
    region = PoolRegion(memory.ctypes.data, *memory.shape, "DRAM", 0, memory)
    return NixlAgent(name, region)
"""
OWNER = """
memory = np.full((4, 4096), 7, dtype=np.uint8)
with open(sys.argv[1], "wb") as file:
    pickle.dump(agent_of("owner", memory).info, file)
print("registered", flush=True)
sys.stdin.readline()
print([int(block.min()) for block in memory], flush=True)
"""
STRANGER = """
with open(sys.argv[1], "rb") as file:
    owner = pickle.load(file)
agent = agent_of("stranger", np.full((4, 4096), 9, dtype=np.uint8))
pool, first = agent.add_peer("owner", owner), np.arange(1, dtype=np.int32)
handle = agent._agent.make_prepped_xfer("WRITE", agent.pool.handle, first, pool.handle, first)
done = agent.post(handle)
while not done:
    time.sleep(0.01)
    done = agent.is_done(handle)
print("written", flush=True)
"""


def start(code: str, file: Path, transports: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", COMMON + code, str(file)],
        cwd=ROOT,
        env=os.environ | {"UCX_NET_DEVICES": "lo", "UCX_TLS": transports, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def until(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdout is not None
    assert any(said.strip() == line for said in process.stdout), f"it ended before {line!r}"


@pytest.mark.parametrize("transports", ["all", "tcp"])
def test_whoever_has_the_metadata_writes(tmp_path: Path, transports: str) -> None:
    file = tmp_path / "metadata"
    owner = start(OWNER, file, transports)
    try:
        until(owner, "registered")
        stranger = start(STRANGER, file, transports)
        until(stranger, "written")
        stranger.communicate(timeout=WAIT_S)
        said, _ = owner.communicate("\n", timeout=WAIT_S)
        assert said.splitlines()[-1] == "[9, 7, 7, 7]"
    finally:
        owner.kill()
