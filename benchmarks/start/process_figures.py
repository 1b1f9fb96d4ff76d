"""What a process has taken since it began, by /proc."""

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Taken:
    """One process, or several in sum; seconds and MiB.

    Attributes:
        start_s: from the start of the process until it served.
        cpu_s: of all its threads in that time.
        rss_mib: resident memory, shared pages too.
        pss_mib: the same, a page shared by N processes as one Nth.
    """

    start_s: float
    cpu_s: float
    rss_mib: float
    pss_mib: float


UNITS = {
    "start_s": "s to serve",
    "cpu_s": "s of CPU to serve",
    "rss_mib": "MiB RSS",
    "pss_mib": "MiB PSS",
}


def taken_by(pid: int) -> Taken:
    """What a process has taken until now, at which it serves.

    Raises:
        OSError: it has ended.
    """
    folder = Path(f"/proc/{pid}")
    text = (folder / "stat").read_text()
    fields = text[text.rindex(")") + 2 :].split()
    began_s = int(fields[19]) / TICKS_PER_S
    sizes = {}
    for line in (folder / "smaps_rollup").read_text().splitlines()[1:]:
        name, size, _ = line.split()
        sizes[name.rstrip(":")] = int(size) / 1024
    return Taken(
        start_s=time.clock_gettime(time.CLOCK_BOOTTIME) - began_s,
        cpu_s=(int(fields[11]) + int(fields[12])) / TICKS_PER_S,
        rss_mib=sizes["Rss"],
        pss_mib=sizes["Pss"],
    )


def in_sum(several: list[Taken]) -> Taken:
    """All of them together; the seconds are those of the slowest."""
    rows = [asdict(taken) for taken in several]
    sums = {name: sum(row[name] for row in rows) for name in UNITS}
    return Taken(**sums | {"start_s": max(row["start_s"] for row in rows)})
