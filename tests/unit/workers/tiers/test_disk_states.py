"""Random uses and abuses of a disk tier: what it says is intact is, and its bounds hold."""

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from disagg.scheduling.actions import TierKey
from disagg.workers.tiers.disk_store import DiskStore
from disagg.workers.tiers.disk_tier import DiskTier
from tests.unit.workers.tiers.stored_blocks import (
    CONTRACT,
    Clock,
    disk_tier,
    files_in,
    key_of,
    path_of,
    read,
    write,
)

BLOCKS_MAX = 4
KEYS = st.lists(st.integers(0, 7).map(key_of), min_size=1, max_size=6, unique=True)


class TwoTiers(RuleBasedStateMachine):
    """Two tiers over one directory, each restarted at times, and somebody who damages files."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="disk-states-")
        self.place = Path(self.folder.name) / "kv"
        self.clock = Clock()
        self.tiers = [self._open(), self._open()]

    def _open(self) -> DiskTier:
        return disk_tier(self.place, blocks_max=BLOCKS_MAX, clock_ns=self.clock)

    def teardown(self) -> None:
        self.folder.cleanup()

    @rule(which=st.integers(0, 1), keys=KEYS)
    def write_some(self, which: int, keys: list[TierKey]) -> None:
        before = {key for key in keys if path_of(self.place, key).exists()}
        stored, evicted = write(self.tiers[which], keys)
        assert len(stored) == min(len(keys), max(BLOCKS_MAX, len(before)))
        assert not set(stored) & set(evicted)
        for key in stored:
            assert path_of(self.place, key).exists()
        for key in evicted:
            assert not path_of(self.place, key).exists()

    @rule(which=st.integers(0, 1), keys=KEYS)
    def read_some(self, which: int, keys: list[TierKey]) -> None:
        there = [path_of(self.place, key).exists() for key in keys]
        for key, was_there, intact in zip(keys, there, read(self.tiers[which], keys), strict=True):
            assert was_there or not intact
            assert path_of(self.place, key).exists() == intact

    @rule(which=st.integers(0, 1), keys=KEYS)
    def forget_some(self, which: int, keys: list[TierKey]) -> None:
        self.tiers[which].forget(keys)
        assert not any(path_of(self.place, key).exists() for key in keys)

    @rule(which=st.integers(0, 1))
    def restart(self, which: int) -> None:
        self.tiers[which].close()
        self.tiers[which] = self._open()
        known = self.tiers[which].known()
        assert {path_of(self.place, key) for key in known} == set(files_in(self.place))

    @rule(
        number=st.integers(0, 7), at=st.integers(0, 600), how=st.sampled_from(["flip", "cut", "rm"])
    )
    def damage(self, number: int, at: int, how: str) -> None:
        path = path_of(self.place, key_of(number))
        if not path.exists():
            return
        if how == "rm":
            path.unlink()
        elif how == "cut":
            os.truncate(path, at)
        else:
            data = bytearray(path.read_bytes())
            if data:
                data[at % len(data)] ^= 1 << at % 8
                path.write_bytes(data)

    @rule(number=st.integers(0, 7), other=st.integers(0, 7))
    def exchange(self, number: int, other: int) -> None:
        path = path_of(self.place, key_of(number))
        source = path_of(self.place, key_of(other))
        if number != other and path.exists() and source.exists():
            shutil.copy(source, path)

    @rule(num_files=st.integers(0, BLOCKS_MAX))
    def shrink(self, num_files: int) -> None:
        DiskStore(str(self.place), create=False, clock_ns=self.clock).shrink(1 << 40, num_files)
        assert len(files_in(self.place)) <= num_files

    @invariant()
    def bounds_hold(self) -> None:
        assert len(files_in(self.place)) <= BLOCKS_MAX
        assert sorted(os.listdir(self.place)) == sorted([CONTRACT.name, "lock"])


TwoTiers.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestTwoTiers = TwoTiers.TestCase
