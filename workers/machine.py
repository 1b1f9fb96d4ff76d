"""What this machine has for a worker: memory, cores, a GPU."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from disagg.errors import ConfigError
from disagg.telemetry.control_groups import group_folders, read_limit

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the host or of a GPU, in bytes."""

    total_bytes: int
    available_bytes: int
    """What can be taken now without taking it from somebody."""


def has_gpu() -> bool:
    """Whether this process can compute on a CUDA device."""
    return torch.cuda.is_available()


def device_memory(device: str, root: Path = _ROOT) -> Memory:
    """Memory of ``cpu`` or of a CUDA device.

    The host's is bounded by the control groups of this process (a container's limit). Memory that
    only caches files counts as available.

    Raises:
        ConfigError: there is no CUDA device.
    """
    if device != "cpu":
        if not has_gpu():
            raise ConfigError(f"worker.device={device}: torch finds no GPU", param="worker.device")
        free, total = torch.cuda.mem_get_info(torch.device(device))
        return Memory(total, free)
    words = [line.split() for line in (root / "proc/meminfo").read_text().splitlines()]
    kib = {name: int(number) for name, number, *_ in words}
    memory = Memory(kib["MemTotal:"] << 10, kib["MemAvailable:"] << 10)
    for limit, used in _group_limits(root):
        memory = Memory(
            min(memory.total_bytes, limit), max(0, min(memory.available_bytes, limit - used))
        )
    return memory


def used_bytes(device: str) -> int:
    """Memory this process holds: of the host for ``cpu``, else what torch has of the GPU."""
    if device != "cpu":
        is_initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return torch.cuda.memory_reserved() if is_initialized else 0
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_cores(root: Path = _ROOT) -> int:
    """Cores this process may use, by affinity and its control groups' quotas; at least 1."""
    cores = len(os.sched_getaffinity(0))
    for folder in group_folders(root, "cpu"):
        quota, period = read_limit(folder / "cpu.max"), 0
        if " " in quota:  # version 2
            quota, _, text = quota.partition(" ")
            period = int(text)
        else:
            quota = read_limit(folder / "cpu.cfs_quota_us")
            period = int(read_limit(folder / "cpu.cfs_period_us") or 0)
        if quota.isdigit() and period:
            cores = min(cores, math.ceil(int(quota) / period))
    return max(1, cores)


def _group_limits(root: Path) -> list[tuple[int, int]]:
    """Limit and use of memory of every control group this process is in, innermost first."""
    found = []
    for folder in group_folders(root, "memory"):
        limit = read_limit(folder / "memory.max") or read_limit(folder / "memory.limit_in_bytes")
        used = read_limit(folder / "memory.current") or read_limit(folder / "memory.usage_in_bytes")
        if not limit.isdigit() or not used.isdigit():
            continue
        stat = dict(line.split() for line in read_limit(folder / "memory.stat").splitlines())
        prefix = (
            "total_" if "total_inactive_file" in stat else ""
        )  # version 1 counts children apart
        files = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        found.append((int(limit), max(0, int(used) - files)))
    return found
