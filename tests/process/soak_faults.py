"""What can be done to a cluster under load; by name, see `FAULTS`."""

import contextlib
from collections.abc import Callable, Iterator

from tests.process.network import Network
from tests.process.soak import READ_STUCK_MS, SILENT_MS, Soak

LONG_S = READ_STUCK_MS / 1000 + 0.5
"""A READ is stuck by then."""
DROPPED_S = SILENT_MS / 1000 + 0.5
"""The router has dropped a silent worker by then."""

# Each is over when its function returns, but for the dead.


def nothing(soak: Soak) -> None:
    """Control: what comes out without a fault."""


def kill(soak: Soak, *names: str) -> None:
    for name in names:
        soak.cluster.workers[name].kill()
        soak.pause(0.2)


def stop(soak: Soak, name: str, longest_s: float, shortest_s: float = 0.0) -> None:
    process = soak.cluster.workers[name]
    process.stop()
    soak.pause(longest_s, shortest_s)
    process.resume()


def stop_and_kill(soak: Soak, stopped: str, killed: str) -> None:
    """The other one dies meanwhile, or the stopped one itself."""
    process = soak.cluster.workers[stopped]
    process.stop()
    soak.pause(READ_STUCK_MS / 1000 + 1)
    soak.cluster.workers[killed].kill()
    soak.pause(0.5)
    if killed != stopped:
        process.resume()


def cut(soak: Soak, longest_s: float, shortest_s: float = 0.0) -> None:
    assert soak.network is not None
    soak.network.cut()
    soak.pause(longest_s, shortest_s)
    soak.network.mend()


@contextlib.contextmanager
def reads_held(soak: Soak) -> Iterator[None]:
    """Within it something breaks; only then READs that waited meanwhile are posted."""
    soak.cluster.tell("d0", "hold reads")
    soak.pause(1.0, 0.3)
    try:
        yield
    finally:
        soak.cluster.tell("d0", "pass reads")


def reads_to_a_stopped_owner(soak: Soak, *, killed: str = "") -> None:
    process = soak.cluster.workers["p0"]
    with reads_held(soak):
        process.stop()
    soak.pause(LONG_S + 2, LONG_S if not killed else 0.0)
    if killed:
        soak.cluster.workers[killed].kill()
        soak.pause(0.5)
    if killed != "p0":
        process.resume()


def reads_over_a_cut_link(soak: Soak) -> None:
    assert soak.network is not None
    with reads_held(soak):
        soak.network.cut()
    soak.pause(LONG_S + 2, LONG_S)
    soak.network.mend()


def cut_and_kill(soak: Soak) -> None:
    assert soak.network is not None
    soak.network.cut()
    soak.pause(1.0)
    soak.cluster.workers[soak.fault_rng.choice(("p0", "d0"))].kill()
    soak.pause(0.5)
    soak.network.mend()


def no_memory(soak: Soak, *names: str) -> None:
    before = num_waits(soak)
    for name in names:
        soak.cluster.tell(name, f"take {soak.fault_rng.choice((0, 3, 20, 40))}")
    soak.pause(2.0)
    for name in names:
        soak.cluster.tell(name, "give")
    soak.round.causes["(went on) no memory"] += num_waits(soak) - before


def num_waits(soak: Soak) -> int:
    """How often memory was not there: reservations refused, requests preempted."""
    counted = [soak.cluster.counters(name) for name in ("p0", "d0")]
    return sum(counts["reservations_refused"] + counts["preemptions"] for counts in counted)


def end_leases(soak: Soak) -> None:
    for _ in range(3):
        soak.cluster.tell("p0", "end_leases")
        soak.pause(0.2)


FAULTS: dict[str, Callable[[Soak], None]] = {
    "nothing": nothing,
    "clients leave": nothing,
    "kill p0": lambda soak: kill(soak, "p0"),
    "kill d0": lambda soak: kill(soak, "d0"),
    "kill both": lambda soak: kill(soak, *soak.fault_rng.sample(("p0", "d0"), 2)),
    "stop p0 shortly": lambda soak: stop(soak, "p0", 1.0),
    "stop d0 shortly": lambda soak: stop(soak, "d0", 1.0),
    "stop p0": lambda soak: stop(soak, "p0", LONG_S + 1, LONG_S),
    "stop d0": lambda soak: stop(soak, "d0", LONG_S + 1, LONG_S),
    "stop p0 until it is dropped": lambda soak: stop(soak, "p0", DROPPED_S + 1, DROPPED_S),
    "stop d0 until it is dropped": lambda soak: stop(soak, "d0", DROPPED_S + 1, DROPPED_S),
    "READs to a stopped owner": reads_to_a_stopped_owner,
    "READs to a stopped owner, kill it": lambda soak: reads_to_a_stopped_owner(soak, killed="p0"),
    "READs to a stopped owner, kill d0": lambda soak: reads_to_a_stopped_owner(soak, killed="d0"),
    "stop p0, kill d0": lambda soak: stop_and_kill(soak, "p0", "d0"),
    "stop d0, kill p0": lambda soak: stop_and_kill(soak, "d0", "p0"),
    "stop d0, kill it": lambda soak: stop_and_kill(soak, "d0", "d0"),
    "no memory at p0": lambda soak: no_memory(soak, "p0"),
    "no memory at d0": lambda soak: no_memory(soak, "d0"),
    "no memory anywhere": lambda soak: no_memory(soak, "p0", "d0"),
    "leases ended": end_leases,
    "cut shortly": lambda soak: cut(soak, 1.0),
    "cut": lambda soak: cut(soak, LONG_S + 2, LONG_S),
    "cut, READs posted": reads_over_a_cut_link,
    "cut, kill one": cut_and_kill,
}
"""By what is printed of a round. Those that begin with "cut" need a network."""


def faults(network: Network | None) -> list[str]:
    return [name for name in FAULTS if network is not None or not name.startswith("cut")]
