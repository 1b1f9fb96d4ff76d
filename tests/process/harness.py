"""A cluster of real processes for tests: one router, any workers, no Ray in between.

Every wait is for a state, has a bound, and fails with the state it saw.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
from openai import OpenAI

from disagg.router.options import RouterOptions
from disagg.tls.authority import create_for_one_run
from disagg.tls.connections import client_channel
from disagg.wire.v1 import router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from disagg.workers.options import WorkerOptions
from tests.process.forked import Forked
from tests.process.network import Place

ROOT = Path(__file__).parents[2]
START_S = 240.0
WAIT_S = 60.0
"""Bounds that only a failure reaches: also a slow machine that does other things keeps them."""
MODEL = "tiny"
HERE = Place()
HASH_KEY = "the secret of the clusters that tests make"
ROUTER: dict[str, Any] = {
    "http_port": 0,
    "admin_port": 0,
    "grpc_port": 0,
    "hash_key": HASH_KEY,
    "allow_unauthenticated": True,  # some listen in a network of the test's own
    "policy": "prefix_then_load",  # hands all over; the default does where it is faster just now
}
SMALL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "num_blocks": 1024,
    "hash_key": HASH_KEY,
    "step_slow_ms": 240_000,  # routers choose as ever, however long a test holds a step
}
"""Many workers share a small machine, and what they compute is compared with float32."""


def wait_until(state: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    """Poll until ``state()`` is true and return it; raise AssertionError with the last one.

    What takes long is looked at less often: a look takes CPU from those who are waited for.
    """
    began = time.monotonic()
    while True:
        seen = state()
        if seen:
            return seen
        waited_s = time.monotonic() - began
        if waited_s > timeout_s:
            raise AssertionError(f"waited {timeout_s} s for {what}; last seen: {seen!r}")
        time.sleep(min(max(0.02, waited_s / 20), 0.1))


def is_stopped(pid: int) -> bool:
    """Whether all threads of a process stand still.

    After the signal they stop one by one, each when it is its turn to run: on a busy machine some
    go on for a while, and may still answer.
    """
    try:
        files = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # a thread has just ended
        return False
    return all(text.rpartition(")")[2].split()[0] == "T" for text in files)


class Process:
    """A child whose output lines can be waited for; ended by the pid that was started."""

    def __init__(
        self, module: str, options: dict[str, Any], log: Path, place: Place = HERE
    ) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "OTEL_TRACES_EXPORTER": "console",
            # Not on a device that a network of this machine's other tests takes away again.
            "UCX_NET_DEVICES": "lo",
            **place.environment,
        }
        self.log = log
        log.touch()  # it can be read before the process has begun
        self._log_start = log.stat().st_size
        options_json = json.dumps(options)
        self.popen: subprocess.Popen[str] | Forked
        if place.command:  # that program starts it there
            with log.open("ab") as log_file:
                self.popen = subprocess.Popen(
                    [*place.command, sys.executable, "-m", module, options_json],
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log_file,
                    text=True,
                )
        else:
            self.popen = Forked(module, options_json, environment, str(log))
        self.lines: list[str] = []
        self._new = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            with self._new:
                self.lines.append(line.rstrip("\n"))
                self._new.notify_all()
        with self._new:
            self._new.notify_all()

    def wait_line(self, start: str, timeout_s: float = WAIT_S, after: int = 0) -> str:
        """The first line from index ``after`` on that starts so."""
        deadline = time.monotonic() + timeout_s
        with self._new:
            while True:
                found = [line for line in self.lines[after:] if line.startswith(start)]
                if found:
                    return found[0]
                left = deadline - time.monotonic()
                # What it said last may be read after its end.
                if left <= 0 or not (self._reader.is_alive() or self.popen.poll() is None):
                    tail = self.logged()[-3000:]
                    raise AssertionError(
                        f"no line {start!r}; lines {self.lines[-10:]}, exit code "
                        f"{self.popen.poll()}, log:\n{tail}"
                    )
                self._new.wait(min(left, 0.5))

    def command(self, line: str) -> int:
        """Send a command and wait for its answer; returns the number of lines before it."""
        before = len(self.lines)
        assert self.popen.stdin is not None
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()
        self.wait_line(f"ok {line}", after=before)
        return before

    def logged(self) -> str:
        """What this process, not an earlier one of its name, has logged."""
        return self.log.read_bytes()[self._log_start :].decode(errors="replace")

    def stop(self) -> None:
        """SIGSTOP: it lives and does nothing, from the return of this call on."""
        self.popen.send_signal(signal.SIGSTOP)
        wait_until(lambda: self.popen.poll() is not None or is_stopped(self.popen.pid), "the stop")

    def resume(self) -> None:
        """SIGCONT."""
        self.popen.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self.popen.kill()
        self.popen.wait(WAIT_S)

    def ask_to_stop(self) -> None:
        """Close its standard input, which ends it."""
        self.resume()
        with contextlib.suppress(OSError):
            assert self.popen.stdin is not None
            self.popen.stdin.close()

    def end(self) -> None:
        """Ask to stop, then insist."""
        self.ask_to_stop()
        try:
            self.popen.wait(15)
        except subprocess.TimeoutExpired:
            self.kill()


@dataclass
class Cluster:
    """Router and workers over one checkpoint directory."""

    model_dir: Path
    logs: Path
    worker_options: dict[str, Any] = field(default_factory=dict)
    router_options: dict[str, Any] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    """Of workers that do not run here."""
    key: str = "none"
    """API key of its clients."""
    worker_module: str = "tests.process.worker_main"
    """What a worker's process runs."""
    router_module: str = "tests.process.router_main"
    workers: dict[str, Process] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    epochs: dict[str, str] = field(default_factory=dict)

    def start(self, **roles: str) -> None:
        """Start the router and one worker per ``name=role``; returns when all are ready."""
        self.tls_directory = str(create_for_one_run(self.logs / "certificates"))
        given = ROUTER | {"tls_directory": self.tls_directory} | self.router_options
        if "worker_silent_ms" in given:  # of a test that stops workers, which stay known
            given = {"worker_silent_busy_ms": given["worker_silent_ms"]} | given
        options = RouterOptions(str(self.model_dir), MODEL, **given)
        self.router = Process(self.router_module, asdict(options), self.logs / "router")
        ports = json.loads(self.router.wait_line("serving ", START_S)[8:])
        self.url = f"http://{options.host}:{ports['http_port']}"
        self.admin_url = f"http://{options.admin_host}:{ports['admin_port']}"
        self.grpc_address = f"{options.host}:{ports['grpc_port']}"
        headers = {"Authorization": f"Bearer {self.key}"}
        self.http = httpx.Client(base_url=self.url, timeout=120, headers=headers)
        self.admin = httpx.Client(base_url=self.admin_url, timeout=120, headers=headers)
        self.client = OpenAI(
            base_url=self.url + "/v1", api_key=self.key, max_retries=0, timeout=120
        )
        for name, role in roles.items():
            self.spawn(name, role)
        self.wait_ready(*roles)

    def spawn(self, name: str, role: str, **changed: Any) -> None:
        """Start a worker process; `wait_ready` waits for it."""
        place = self.places.get(name, HERE)
        given = SMALL | {"heartbeat_ms": 200, "host": place.host}
        given["tls_directory"] = self.tls_directory
        options = WorkerOptions(
            worker_id=name,
            role=role,
            model_dir=str(self.model_dir),
            model_name=MODEL,
            router_addresses=(self.grpc_address,),
            **(given | self.worker_options | changed),
        )
        self.workers[name] = Process(self.worker_module, asdict(options), self.logs / name, place)

    def wait_ready(self, *names: str) -> None:
        """Until each worker serves, and the router has it in this life and ready."""
        for name in names:
            self.wait_serving(name)

        def ready() -> bool:
            known = self.known()
            return all(
                name in known
                and known[name]["info"]["incarnation"]["epoch"] == self.epochs[name]
                and known[name]["ready"]
                for name in names
            )

        wait_until(ready, f"{names} to be ready at the router", START_S)

    def wait_serving(self, name: str) -> None:
        """Until a worker has said where it serves."""
        said = json.loads(self.workers[name].wait_line("serving ", START_S)[8:])
        self.addresses[name], self.epochs[name] = said["address"], said["epoch"]

    def known(self) -> dict[str, dict[str, Any]]:
        """The workers as the router sees them, by name."""
        views = self.admin.get("/v1/disagg/workers").json()["workers"]
        return {view["info"]["incarnation"]["worker_id"]: view for view in views}

    def channel(self, address: str) -> grpc.Channel:
        """To one of its gRPC services, as a node."""
        return client_channel(address, self.tls_directory)

    def status(self, name: str) -> worker_pb2.StatusResponse:
        """The worker's own view, by its Status rpc."""
        with self.channel(self.addresses[name]) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            return stub.Status(worker_pb2.StatusRequest(), timeout=WAIT_S)

    def record(self, request_id: str) -> dict[str, Any]:
        """What the router says happened to a request, once it has it."""

        def record() -> dict[str, Any] | None:
            answer = self.admin.get(f"/v1/disagg/requests/{request_id}")
            return answer.json() if answer.status_code == 200 else None

        found: dict[str, Any] = wait_until(record, f"the router to have {request_id}")
        return found

    def usable_tokens(self, prompt: Sequence[int]) -> dict[str, int]:
        """Per worker the prefix of a prompt that it has, as the router sees it."""
        with self.channel(self.grpc_address) as channel:
            request = router_pb2.MatchRequest(model=MODEL, token_ids=prompt)
            answer = router_pb2_grpc.RouterStub(channel).Match(request, timeout=WAIT_S)
        return {one.worker.worker_id: one.usable_tokens for one in answer.workers}

    def held(self) -> list[str]:
        """Living workers whose pool is not as free as at its start, with what they hold."""
        out = []
        for name in self.living():
            status = self.status(name)
            stats = status.stats
            if stats.num_blocks_free != stats.num_blocks_usable or status.holders:
                out.append(f"{name}: {status}")
        return out

    def wait_quiescent(self, timeout_s: float = WAIT_S) -> None:
        """Until every living worker's pool is as free as at its start and nobody holds a thing."""
        deadline = time.monotonic() + timeout_s
        while held := self.held():
            assert time.monotonic() < deadline, f"still held after {timeout_s} s: {held}"
            time.sleep(0.05)

    def tell(self, name: str, line: str) -> int:
        """Command a worker; the result tells `wait_told` where to look from."""
        return self.workers[name].command(line)

    def wait_told(self, name: str, start: str, after: int) -> str:
        """A line that a worker said since a command."""
        return self.workers[name].wait_line(start, after=after)

    def counts(self, name: str) -> dict[str, int]:
        """What has reached a worker in this life: router messages and engine steps."""
        said = self.wait_told(name, "counts ", self.tell(name, "counts"))
        counts: dict[str, int] = json.loads(said.removeprefix("counts "))
        return counts

    def metric(self, series: str) -> float:
        """One series of the router's metrics page, labels included; 0 when it is not there."""
        for line in self.admin.get("/metrics").text.splitlines():
            if line.startswith(series + " "):
                return float(line.split()[-1])
        return 0.0

    def living(self) -> list[str]:
        """Workers whose process runs."""
        return [name for name, process in self.workers.items() if process.popen.poll() is None]

    def counters(self, name: str) -> dict[str, int]:
        """The worker's monotonic counters."""
        return dict(self.status(name).stats.counters)

    def end(self) -> None:
        """Stop everything that was started."""
        for process in self.workers.values():
            process.ask_to_stop()
        for process in self.workers.values():
            process.end()
        if hasattr(self, "router"):
            self.router.end()
        if hasattr(self, "http"):
            self.http.close()
            self.admin.close()
            self.client.close()


@contextlib.contextmanager
def running(cluster: Cluster, **roles: str) -> Iterator[Cluster]:
    """Start a cluster and end it whatever happens."""
    try:
        cluster.start(**roles)
        yield cluster
    finally:
        cluster.end()
