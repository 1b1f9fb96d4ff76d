"""A router and two workers that stay up; who plans, and as what the workers register, changes."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.policy.switched import COMMAND, SWITCHED
from tests.process.harness import Cluster, running, wait_until

WORKERS = ("one", "two")
OPTIONS: dict[str, Any] = {
    "num_blocks": 4_096,
    "block_tokens": 16,
    "max_model_tokens": 8_192,
    "max_step_tokens": 512,
    "max_sequences": 64,
}
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class System:
    """A rule and the roles of the workers that it plans for."""

    name: str
    policy: str
    roles: tuple[str, str] = ("prefill", "decode")


class Fleet:
    """What `running_fleet` gives."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._roles = dict.fromkeys(WORKERS, "both")
        self.url, self.admin_url = cluster.url, cluster.admin_url

    def become(self, system: System, slo_tpot_ms: float = 0.0) -> None:
        """Plan by this system's rule, with empty caches and nothing going on.

        Args:
            system: from now on.
            slo_tpot_ms: the setting of that name.
        """
        cluster = self._cluster
        cluster.wait_quiescent()
        cluster.router.command(f"{COMMAND} {system.policy} {slo_tpot_ms}")
        for name, role in zip(WORKERS, system.roles, strict=True):
            if self._roles[name] != role:
                cluster.tell(name, f"role {role}")
                self._roles[name] = role
        wait_until(self._knows_roles, "the router to know the workers' roles")
        answer = cluster.admin.post("/reset_prefix_cache")
        answer.raise_for_status()

    def record(self, request_id: str) -> Mapping[str, Any]:
        """How a request went, as the router has it."""
        return self._cluster.record(request_id)

    def cpu_s(self) -> float:
        """CPU seconds of the router and of the workers so far."""
        processes = (self._cluster.router, *self._cluster.workers.values())
        ticks = 0
        for process in processes:
            text = Path(f"/proc/{process.popen.pid}/stat").read_text()
            ticks += sum(map(int, text[text.rindex(")") + 2 :].split()[11:13]))
        return ticks / TICKS_PER_S

    def _knows_roles(self) -> bool:
        known = self._cluster.known()
        return all(
            known[name]["ready"] and known[name]["info"]["role"] == role
            for name, role in self._roles.items()
        )


@contextmanager
def running_fleet(checkpoint: Path, logs: Path) -> Iterator[Fleet]:
    """Start it, with a thread for each worker's engine."""
    cluster = Cluster(
        checkpoint,
        logs,
        dict(OPTIONS),
        {"policy": SWITCHED, "records_max": 4_096},
        router_module="benchmarks.policy.switched",
    )
    with running(cluster, **dict.fromkeys(WORKERS, "both")):
        yield Fleet(cluster)
