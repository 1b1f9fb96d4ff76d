"""Ranks that Ray starts on two hosts: exact answers, one end for all, nobody left behind."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from disagg.cluster.processes import ProcessId, find_descendants, read_process
from disagg.cluster.run_folder import RunFolder
from disagg.workers.engines.vllm.executors import SOCKETS
from tests.checkpoints import make_checkpoint, reference_generate
from tests.process.harness import wait_until
from tests.process.network import Place, UnavailableError, network
from tests.process.program import BOUND_S, Program, wait_until_gone
from tests.process.ray_hosts import RayHosts, environment_of, ray_hosts
from tests.vllm.engines import BLOCK_TOKENS, VLLM_SHAPE, shared_memory

pytestmark = [pytest.mark.vllm, pytest.mark.cluster, pytest.mark.timeout(1200)]

WINDOW = 40
START_S = 600.0
"""Bound on the start of two workers and four ranks, which all import vLLM."""
NUM_TOKENS = 8
WORKERS = ("prefill-0", "decode-0")
SERVES = r"worker {} serves{} on (\S+):\d+ \(pid (\d+), epoch (\w+)\)"
RANK = re.compile("VLLM::|CpuRayProcess")
"""In the names of the processes of ranks: vLLM's, and before that Ray's."""
RESOURCES = [{"CPU": 2, "disagg_prefill": 1}, {"CPU": 4, "disagg_decode": 1}]
"""The prefill worker's process and its first rank fill the first host."""


def settings(hosts: RayHosts, model_dir: Path, host: str) -> dict[str, Any]:
    return {
        "model": {"dir": str(model_dir), "name": "tiny"},
        "router": {
            "host": host,
            "http_port": 0,
            "admin_host": host,
            "admin_port": 0,
            "grpc_port": 0,
            "allow_unauthenticated": True,  # in a network of the test's own
            "pull_tokens_min": 64,
        },
        "worker": {
            "host": "node",
            "engine": "vllm",
            "device": "cpu",
            "num_threads": 1,
            "num_blocks": 300,
            "block_tokens": BLOCK_TOKENS,
            "tensor_parallel": 2,
            "tensor_parallel_backend": "ray",
        },
        "transfer": {"reserve_timeout_ms": 30_000},
        "scheduling": {"max_model_tokens": 1024, "max_step_tokens": 96, "max_sequences": 8},
        "cluster": {
            "ray_address": hosts.address,
            "role_resources": True,
            "num_cpus_per_worker": 1,
            "start_timeout_s": START_S,
        },
    }


class Served:
    """``disagg serve`` on the first of two hosts."""

    def __init__(
        self,
        hosts: RayHosts,
        place: Place,
        program: Program,
        urls: tuple[str, str],
        model_dir: Path,
    ) -> None:
        self.hosts, self.place, self.program, self._model_dir = hosts, place, program, model_dir
        self.folder = model_dir.parent
        self.url, self._admin_url = urls
        self.sockets = Path(os.environ[SOCKETS])

    def ask(self, length: int, request_id: str) -> dict[str, Any]:
        """Check an answer against plain transformers; returns the router's record of it."""
        prompt = [1, *(20 + i * 37 % 200 for i in range(length - 1))]
        _, logprobs, gap = reference_generate(self._model_dir, prompt, NUM_TOKENS)
        assert gap > 1e-3
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "logprobs": 0,
        }
        headers = {"X-Request-Id": request_id}
        answer = httpx.post(f"{self.url}/completions", json=body, headers=headers, timeout=BOUND_S)
        assert answer.status_code == 200, answer.text
        found = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
        assert found == pytest.approx(logprobs, abs=1e-4)
        record: dict[str, Any] = httpx.get(f"{self._admin_url}/disagg/requests/{request_id}").json()
        return record

    def worker_pid(self, name: str) -> int:
        """The process of a worker's last life."""
        return int(self._last_life(name)[2])

    def wait_until_ready(self) -> None:
        """Until the router has both workers in their last lives."""
        wanted = {(name, self._last_life(name)[3]) for name in WORKERS}
        deadline = time.monotonic() + BOUND_S
        while True:
            workers = httpx.get(f"{self._admin_url}/disagg/workers", timeout=BOUND_S).json()[
                "workers"
            ]
            found = [(w["info"]["incarnation"], w["ready"]) for w in workers]
            ready = {(life["worker_id"], life["epoch"]) for life, is_ready in found if is_ready}
            if wanted <= ready:
                return
            assert time.monotonic() < deadline, workers
            time.sleep(0.05)

    def _last_life(self, name: str) -> re.Match[str]:
        lives = [re.search(SERVES.format(name, "(?: again)?"), line) for line in self.program.lines]
        return [life for life in lives if life is not None][-1]

    def ranks(self) -> list[ProcessId]:
        """Processes of ranks, on both hosts."""
        found = [read_process(pid) for pid in self.hosts.pids]
        roots = {each[0] for each in found if each is not None}
        return [process for process in find_descendants(roots) if RANK.search(name_of(process))]

    def wait_for_ranks(self) -> list[ProcessId]:
        """Those of both workers alone; what is left of a dead worker's takes its time to go."""
        ranks: list[ProcessId] = wait_until(
            lambda: found if len(found := self.ranks()) == 4 else None, "four ranks", BOUND_S
        )
        return ranks


def name_of(process: ProcessId) -> str:
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("ray")
    sockets = RunFolder()  # its path is short
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv(SOCKETS, str(sockets.path))
    model_dir = make_checkpoint(folder / "gemma3", "gemma3", window=WINDOW, **VLLM_SHAPE)
    try:
        with network() as made, ray_hosts(made, RESOURCES) as hosts:
            place = made.places[0]
            path = folder / "settings.yaml"
            path.write_text(yaml.safe_dump(settings(hosts, model_dir, place.host)))
            program = Program(
                "disagg.commands",
                *("serve", "--config", str(path)),
                cwd=folder,
                before=place.command,
                environment=environment_of(place),
            )
            try:
                lines = [SERVES.format(name, "") for name in WORKERS]
                lines += [r"serving tiny on (\S+)", r"metrics and records are on (\S+)"]
                *_, url, admin_url = program.wait_for_all(lines, START_S)
                yield Served(hosts, place, program, (url[1], admin_url[1] + "/v1"), model_dir)
            finally:
                program.end()
    except UnavailableError as error:
        pytest.skip(str(error))
    finally:
        monkeypatch.undo()
        sockets.remove()


def test_handed_over_between_ranks_of_two_hosts(served: Served) -> None:
    mapped = shared_memory(rank.pid for rank in served.wait_for_ranks())
    assert mapped  # control
    assert {name for name in mapped if not name.endswith(" (deleted)")} == set()
    bound = [Path(f"/proc/{rank.pid}/net/unix").read_text() for rank in served.ranks()]
    assert all(f"{served.sockets}/" in one for one in bound)  # control: of sockets whose names went
    assert list(served.sockets.iterdir()) == []
    for length in (33, 2 * WINDOW, 7 * WINDOW + 3):
        (generation,) = served.ask(length, f"over-{length}")["generations"]
        groups = generation["transfer"]["groups"]
        assert sum(group["pulled_bytes"] for group in groups) > 0


def test_a_rank_that_dies_ends_its_worker_and_both_come_back(served: Served) -> None:
    before = served.wait_for_ranks()
    os.kill(before[0].pid, signal.SIGKILL)
    served.program.wait_for(SERVES.format(r"\S+", " again"), START_S)
    after = served.wait_for_ranks()
    assert len(set(after) & set(before)) == 2  # those of the other worker
    served.wait_until_ready()
    served.ask(2 * WINDOW, "rank-again")


def test_a_worker_that_dies_takes_its_ranks_with_it(served: Served) -> None:
    before = served.wait_for_ranks()
    os.kill(served.worker_pid("prefill-0"), signal.SIGKILL)
    served.program.wait_for(SERVES.format("prefill-0", " again"), START_S)
    after = served.wait_for_ranks()
    assert len(set(after) & set(before)) == 2
    served.wait_until_ready()
    served.ask(2 * WINDOW, "worker-again")


def test_ranks_outlive_disagg_serve_until_their_workers_are_ended(served: Served) -> None:
    """The last test: there is no router after it."""
    ranks = served.wait_for_ranks()
    served.program.end()
    assert set(served.ranks()) == set(ranks)
    place, folder = served.place, served.folder
    given = ("cluster.router_addresses=127.0.0.1:1", f"cluster.hash_key={'ab' * 32}")
    ending = Program(
        "disagg.commands",
        *("workers", "--end", "--config", str(folder / "settings.yaml")),
        *(f"--set={setting}" for setting in given),
        cwd=folder,
        before=place.command,
        environment=environment_of(place),
    )
    try:
        assert ending.process.wait(BOUND_S) == 0
    finally:
        ending.end()
    wait_until_gone(set(ranks))
