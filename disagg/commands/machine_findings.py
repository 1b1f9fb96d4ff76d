"""This machine and what is installed on it, as `disagg doctor` looks at them."""

import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from disagg.commands.finding import Finding, fault, note, ok, warning
from disagg.telemetry.open_files import UNLIMITED, files_within

PYTHON_MIN = (3, 11)
SHM_BYTES_MIN = 1 << 30
PROBE_TIMEOUT_S = 120.0
INFINIBAND = Path("/sys/class/infiniband")


def look_at_machine(files_min: int) -> Iterator[Finding]:
    """Everything about this machine; ``files_min`` is how many files the router may need."""
    yield look_at_python(sys.version_info[:3])
    yield from look_at_packages()
    yield look_at_gpu()
    yield look_at_nixl()
    yield from look_at_rdma(INFINIBAND, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield look_at_shared_memory(Path("/dev/shm"))
    yield look_at_files(resource.getrlimit(resource.RLIMIT_NOFILE), files_min)


def look_at_python(found: tuple[int, ...]) -> Finding:
    """The interpreter's version."""
    seen = f"{platform.python_implementation()} {'.'.join(map(str, found))} ({sys.executable})"
    if found[:2] < PYTHON_MIN:
        least = ".".join(map(str, PYTHON_MIN))
        return fault("python", seen, f"install Python {least} or newer and disagg with it")
    return ok("python", seen)


def look_at_packages(wanted: list[str] | None = None) -> Iterator[Finding]:
    """Whether what disagg needs is installed in the versions that it needs."""
    found = []
    for text in (requires("disagg") or []) if wanted is None else wanted:
        need = Requirement(text)
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = version(need.name)
        except PackageNotFoundError:
            yield fault(need.name, "not installed", f"pip install '{need}'")
            continue
        if not need.specifier.contains(installed, prereleases=True):
            seen = f"{installed}, not {need.specifier}"
            yield fault(need.name, seen, f"pip install '{need.name}{need.specifier}'")
        else:
            found.append(f"{need.name} {installed}")
    shown = [one for one in found if one.split()[0] in ("torch", "nixl", "ray", "transformers")]
    yield ok("packages", f"{len(found)} as needed: {', '.join(shown)}")


def look_at_gpu() -> Finding:
    """What torch can compute on, and whether this machine has GPUs that it cannot use."""
    import torch

    built = f"torch {torch.__version__}"
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return ok("gpu", f"{built}, CUDA {torch.version.cuda}: {', '.join(names)}")
    driver = shutil.which("nvidia-smi") or next(Path("/dev").glob("nvidia[0-9]*"), None)
    if driver is None:
        return note("gpu", f"{built}: none here, workers compute on the CPU")
    if torch.version.cuda is None:
        advice = "install torch's CUDA build: pip install --force-reinstall torch"
        return fault("gpu", f"{built} has no CUDA, but there is {driver}", advice)
    advice = "see what nvidia-smi says: the driver may be too old, or the device hidden"
    return fault("gpu", f"{built} finds no device, but there is {driver}", advice)


def look_at_nixl(command: tuple[str, ...] = ("-m", "disagg.commands.nixl_probe")) -> Finding:
    """Whether NIXL moves bytes here by UCX; in a process of its own, which it may end."""
    networks = {name: os.environ[name] for name in sorted(os.environ) if name.startswith("UCX_")}
    told = f" with {networks}" if networks else ""
    advice = "pip install --force-reinstall 'nixl>=1.5.1,<1.6'; unset UCX_* variables, then again"
    try:
        probe = subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return fault("nixl", f"no READ ended in {PROBE_TIMEOUT_S:g} s{told}", advice)
    if probe.returncode:
        last = (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
        return fault("nixl", f"a READ failed{told}: {last}", advice)
    return ok("nixl", f"{probe.stdout.strip()}{told}")


def look_at_rdma(folder: Path, memlock_bytes: int) -> Iterator[Finding]:
    """RDMA devices, whether their ports are up, and whether memory may be registered with them."""
    devices = sorted(folder.iterdir()) if folder.is_dir() else []
    if not devices:
        yield note("rdma", "no devices: KV goes over TCP, and shared memory on one host")
        return
    for device in devices:
        for state in sorted(device.glob("ports/*/state")):
            seen = f"{device.name} port {state.parent.name}: {state.read_text().strip()}"
            if "ACTIVE" in seen:
                yield ok("rdma", seen)
            else:
                yield warning("rdma", seen, "check the cable, the switch, and ibstat")
    if memlock_bytes != UNLIMITED:
        seen = f"{memlock_bytes >> 10} KiB may be locked (ulimit -l)"
        advice = (
            "set memlock to unlimited, in limits.conf, LimitMEMLOCK= or the container's ulimits"
        )
        yield fault("rdma memory", seen, advice)


def look_at_shared_memory(place: Path) -> Finding:
    """Room for Ray's object store, UCX on one host, and the queues between an engine's ranks."""
    if not place.is_dir():
        return fault("shared memory", f"there is no {place}", f"mount a tmpfs at {place}")
    room = shutil.disk_usage(place)
    seen = f"{room.free >> 20} of {room.total >> 20} MiB free in {place}"
    if room.free < SHM_BYTES_MIN:
        advice = "give 1 GiB or more: docker run --shm-size=4g, on Kubernetes an emptyDir in memory"
        return warning("shared memory", seen, advice)
    return ok("shared memory", seen)


def look_at_files(limits: tuple[int, int], files_min: int) -> Finding:
    """Whether as many files may be open as the router takes connections; it asks for them."""
    num_files = files_within(*limits)
    seen = f"{num_files} may be open (ulimit -Hn)"
    if num_files < files_min:
        advice = (
            f"allow {files_min}: LimitNOFILE=, the container's ulimits or limits.conf; else the "
            "router takes fewer connections than limits.connections_max"
        )
        return warning("file descriptors", f"{seen}, {files_min} may be needed", advice)
    return ok("file descriptors", seen)
