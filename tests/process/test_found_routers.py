"""Routers that come under a name, late, and one too many: with the resolver of the machine."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.tls.connections import client_channel
from disagg.wire.v1 import worker_pb2, worker_pb2_grpc
from tests.checkpoints import make_checkpoint
from tests.process.harness import START_S, WAIT_S, wait_until
from tests.process.network import Place, UnavailableError, run
from tests.process.replicas import Replicas, Router, collect, free_port, stream
from tests.process.served_model import WINDOW
from tests.process.test_routers import begun, body, whole

pytestmark = pytest.mark.timeout(900)

NAME = "routers.test"
LONG = 600
FIRST = 1
HOSTS = {"a": "127.0.0.2", "b": "127.0.0.3", "c": "127.0.0.4"}


class Named(Replicas):
    """Replicas on one port of several addresses, which workers know by a name.

    The workers' resolver reads a file of this test in the place of ``/etc/hosts``.
    """

    port = 0

    def name(self, *routers: str) -> None:
        """Let the name stand for these from now on."""
        lines = [f"{HOSTS[router]} {NAME}\n" for router in routers]
        (self.logs / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))

    def start_named(self, router: str) -> Router:
        self.start_router(router, host=HOSTS[router], grpc_port=self.port)
        return self.routers[router]

    def living(self, router: str) -> Router:
        """A router that runs and is named, started if it does not: tests also run alone."""
        if router not in self.routers or self.routers[router].process.popen.poll() is not None:
            self.start_named(router)
        self.name(*HOSTS)
        found = self.routers[router]
        wait_until(lambda: "router serves" in logs(found), f"{router} to serve", START_S)
        return found


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Named]:
    folder = tmp_path_factory.mktemp("named")
    model_dir = make_checkpoint(folder / "gemma3", "gemma3", window=WINDOW)
    hosts = f'mount --bind {folder / "hosts"} /etc/hosts && exec "$@"'
    place = Place(command=("unshare", "-m", "sh", "-c", hosts, "sh"))
    options = {"worker_silent_ms": 60_000, "drain_timeout_ms": 120_000}
    replicas = Named(model_dir, folder, options, places={"s0": place, "s1": place})
    replicas.port = free_port()
    replicas.sources = (f"dns:{NAME}:{replicas.port}",)
    replicas.name("a")
    try:
        run(*place.command, "true")
    except UnavailableError as error:
        pytest.skip(f"needs a mount namespace: {error}")
    try:
        replicas.start()  # makes the certificates
        replicas.start_named("a")
        replicas.roles |= {"s0": "both", "s1": "both"}
        replicas.start_worker("s0")
        replicas.start_worker("s1", routers_max=2)
        replicas.wait_ready()
        yield replicas
    finally:
        replicas.end()


def num_known(router: Router) -> int:
    return len(router.workers())


def logs(router: Router) -> str:
    return router.process.logged()


def test_workers_follow_what_a_name_stands_for(named: Named) -> None:
    a, b = named.routers["a"], named.start_named("b")
    expected = whole(a, FIRST, LONG)
    events = begun(a, FIRST, num_tokens=LONG)
    wait_until(lambda: "router serves" in logs(b), "b to serve", START_S)
    time.sleep(1)  # five look-ups: a control, which can only pass wrongly
    assert num_known(b) == 0, "nobody has named it"
    named.name("a", "b")
    named.wait_ready("b")
    beginning = whole(b, FIRST, 24)  # few tokens, so that a still writes
    assert beginning
    assert expected.startswith(beginning)
    named.name("b")
    answer = collect(events)
    assert (answer.text, answer.error, answer.done) == (expected, None, True)
    assert num_known(a) == 2, "it is no more named, but it lives"
    named.name("a", "b")


def test_a_router_that_comes_late_knows_all_prefixes(named: Named) -> None:
    a = named.routers["a"]
    salts = range(40, 46)
    for salt in salts:
        whole(a, salt, 4)

    def entries(router: Router) -> dict[str, int]:
        return {name: view["index_entries"] for name, view in router.workers().items()}

    known = wait_until(lambda: all(entries(a).values()) and entries(a), "a's index")
    late = named.start_named("c")
    named.name("a", "b", "c")
    named.roles.pop("s1", None)  # it serves two routers and no more: not ready at this one
    epoch = named.epochs.pop("s1")
    process = named.workers.pop("s1")
    try:
        named.wait_ready("c")
        wait_until(lambda: entries(late).get("s0") == known["s0"], "the whole index of s0")
        assert any(expected_hits(late, salt) for salt in (FIRST, *salts))
    finally:
        named.roles["s1"], named.epochs["s1"], named.workers["s1"] = "both", epoch, process


def expected_hits(router: Router, salt: int) -> int:
    """Prompt tokens that the router expects to be cached where it sends a prompt again."""
    assert collect(stream(router.http, body(salt, 4), "late")).done
    (generation,) = router.record("late")["generations"]
    hits: int = generation["expected_hit_tokens"]
    return hits


def test_one_router_too_many_is_told_and_comes_in_when_there_is_room(named: Named) -> None:
    a, b = named.living("a"), named.living("b")
    wait_until(lambda: "s1" in b.workers(), "s1 at b")
    c = named.living("c")
    said = "2 routers have sessions (worker.routers_max)"
    wait_until(lambda: f"RESOURCE_EXHAUSTED: {said}" in logs(c), "c to be told")
    worker = named.workers["s1"]
    assert "is refused: 2 have sessions" in worker.logged()
    assert "s1" in a.workers()
    assert "s1" in b.workers()
    expected = whole(a, 3, 24)
    assert whole(c, 3, 24) == expected, "the other worker serves it"
    b.process.popen.send_signal(signal.SIGTERM)
    assert b.process.popen.wait(WAIT_S) == 0
    wait_until(lambda: c.workers().get("s1", {}).get("ready"), "s1 at c", START_S)


def resources(pid: int) -> dict[str, int]:
    """Open files, threads and resident KiB of a process."""
    folder = Path(f"/proc/{pid}")
    status = dict(
        line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line
    )
    return {
        "files": len(list((folder / "fd").iterdir())),
        "threads": int(status["Threads"]),
        "resident_kib": int(status["VmRSS"].split()[0]),
    }


def test_a_router_that_is_killed_again_and_again_leaves_nothing_at_a_worker(named: Named) -> None:
    """Each life has a request running and its own view of the cache when it dies."""
    a = named.routers["a"]
    worker = named.workers["s0"]

    def idle() -> bool:
        return not any(view["stats"]["loads"] for view in a.workers().values())

    def live() -> None:
        c = named.living("c")

        def served() -> bool:
            known = c.workers().get("s0")
            return bool(known and known["ready"])

        wait_until(served, "s0 at c", START_S)
        events = begun(c, 50, "same")
        c.process.kill()
        events.close()  # type: ignore[attr-defined]
        wait_until(idle, "the end of what it asked for")

    live()
    before = resources(worker.popen.pid)
    for _ in range(12):
        live()
    allowed = before | {
        "threads": before["threads"] + 2,
        "resident_kib": before["resident_kib"] + 64 * 1024,
    }

    def is_as_before() -> bool:
        now = resources(worker.popen.pid)
        return all(now[name] <= allowed[name] for name in allowed)

    wait_until(is_as_before, f"a worker that keeps to {allowed}")
    address = f"{a.workers()['s0']['info']['address']}"
    with client_channel(address, named.tls_directory) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)

        def is_empty() -> bool:
            # What a router sees of a worker is as old as its last heartbeat.
            status = stub.Status(worker_pb2.StatusRequest())
            return not status.holders and not status.leases

        wait_until(is_empty, "the end of its holders and leases")
    named.start_named("b")
    named.start_named("c")
