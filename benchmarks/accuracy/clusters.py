"""Our side: a cluster per mode, the faults during one of them, and what the router counted."""

import re
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from tests.process.harness import MODEL, Cluster, running

WINDOW_GROUP = 0
"""Of the demo's checkpoint: its sliding layers."""
NUM_BETWEEN_FAULTS = 6
"""Requests that come between two faults."""
COUNTER = re.compile(r"^disagg_routing_(\w+)_total(?:\{(.*)\})? (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Mode:
    """How the model is served.

    Attributes:
        name: in the table.
        roles: of the workers, by name.
        options: of all of them.
        passes: how often the task is run; the last one counts.
        is_disturbed: workers are killed and READs fail meanwhile.
        is_corrupted: of what a READ brings one window block is overwritten: the control.
    """

    name: str
    roles: Mapping[str, str]
    options: Mapping[str, Any] = field(default_factory=dict)
    passes: int = 1
    is_disturbed: bool = False
    is_corrupted: bool = False


PAIR = {"p0": "prefill", "d0": "decode"}
UNCACHED = {"prefix_caching": False}
MODES = (
    Mode("colocated: one worker of both roles", {"b0": "both"}, UNCACHED),
    Mode("P/D", PAIR, UNCACHED),
    Mode("P/D, prefix cache, second pass", PAIR, passes=2),
    Mode(
        "P/D with faults: 2 + 2 workers, killed in turn, READs fail",
        PAIR | {"p1": "prefill", "d1": "decode"},
        is_disturbed=True,
    ),
)
CONTROL = Mode(
    "control: P/D, a window block of each READ overwritten", PAIR, UNCACHED, is_corrupted=True
)


@contextmanager
def serving(mode: Mode, checkpoint: Path, logs: Path) -> Iterator[Cluster]:
    """A cluster as the mode says; its faults go on until the end."""
    logs.mkdir(parents=True)
    cluster = Cluster(checkpoint, logs, dict(mode.options))
    with running(cluster, **mode.roles):
        if mode.is_corrupted:
            cluster.tell("d0", f"corrupt {WINDOW_GROUP}")
        if not mode.is_disturbed:
            yield cluster
            return
        faults = Faults(cluster)
        faults.start()
        try:
            yield cluster
        finally:
            faults.end()


class Faults:
    """One fault after the other, as fast as requests come between them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._is_over = threading.Event()
        self._executor = ThreadPoolExecutor(1)
        self.num_kills = self.num_broken = 0

    def start(self) -> None:
        """Begin with the first one."""
        self._done = self._executor.submit(self._run)

    def end(self) -> None:
        """Wait until the last one is over; raises what stopped them before their time."""
        self._is_over.set()
        self._executor.shutdown()
        self._done.result()
        if not (self.num_kills and self.num_broken):
            raise RuntimeError("the run was over before there was a fault of each kind")

    def _run(self) -> None:
        for killed in cycle(("d0", "p0", "d1", "p1")):
            self._break_reads("d1" if killed == "d0" else "d0")
            self._cluster.workers[killed].kill()
            self.num_kills += 1
            self._wait_for_requests()
            self._revive(killed)
            if not self._wait_for_requests():
                return

    def _break_reads(self, name: str) -> None:
        """NIXL raises at every READ that is posted, until some more requests have come.

        A worker whose NIXL stays broken ends by itself; it is started again as well.
        """
        self._cluster.tell(name, "break posts")
        self.num_broken += 1
        self._wait_for_requests()
        try:
            self._cluster.tell(name, "mend posts")
        except (OSError, AssertionError):
            if name in self._cluster.living():
                raise
            self._revive(name)

    def _revive(self, name: str) -> None:
        """Start a dead worker under its name, as the supervisor does."""
        self._cluster.spawn(name, {"p": "prefill", "d": "decode"}[name[0]])
        self._cluster.wait_ready(name)

    def _wait_for_requests(self) -> bool:
        """Until some more have come; False when all is over."""
        aim = num_requests(self._cluster) + NUM_BETWEEN_FAULTS
        while not self._is_over.wait(0.05):
            if num_requests(self._cluster) >= aim:
                return True
        return False


def num_requests(cluster: Cluster) -> int:
    """Requests that have come so far."""
    return counted(cluster).get("requests", 0)


def counted(cluster: Cluster) -> dict[str, int]:
    """The router core's counters so far, as ``name`` or ``name:label``, and sums of labels."""
    return counted_on(cluster.admin.get("/metrics").text)


def counted_on(page: str) -> dict[str, int]:
    """The same, of a page of metrics."""
    found: dict[str, int] = {}
    for name, labels, number in COUNTER.findall(page):
        label = ":".join(value for key, value in LABEL.findall(labels) if key != "model_name")
        for key in {name, f"{name}:{label}" if label else name}:
            found[key] = found.get(key, 0) + int(float(number))
    return found


def url_of(cluster: Cluster) -> tuple[str, str]:
    """Where it serves, and the model's name there."""
    return cluster.url, MODEL
