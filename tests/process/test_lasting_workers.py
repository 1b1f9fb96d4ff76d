"""Workers outlive their supervisor: found again, replaced where settings changed, else untouched.

The workers in the actors are stand-ins; the tests are steps of one life and run in their order.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.process.program import ROOT, Program, wait_until_gone

# Slow, as a run of the normal tests starts one Ray cluster only: that of test_serve.
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

BOUND_S = 400.0
JOINS_MAX = 4
SERVES = r"worker {} serves{} on \S+ \(pid (\d+), epoch (\w+)\)"

Supervise = Callable[..., Program]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text("{}")
    return made


@pytest.fixture(scope="module")
def ray(folder: Path) -> Iterator[Program]:
    started = Program("tests.process.ray_main", str(folder), cwd=folder)
    yield started
    started.end()


@pytest.fixture(scope="module")
def address(ray: Program) -> Iterator[str]:
    """Of the cluster, whose token is in the environment meanwhile."""
    found = ray.wait_for(r"^ray (\S+) (\w+)$", BOUND_S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", found[2])
        yield found[1]


@pytest.fixture(scope="module")
def supervise(address: str, folder: Path) -> Iterator[Supervise]:
    """Starts a supervisor, after the last one was killed."""
    running: list[Program] = []

    def start(*changes: str) -> Program:
        for program in running:
            program.end()
        running.append(
            Program(
                "tests.process.lasting_run",
                *(str(folder), address, *changes),
                cwd=folder,
            )
        )
        return running[-1]

    yield start
    for program in running:
        program.end()


def epochs(program: Program, *workers: str) -> dict[str, str]:
    """Of every worker's last life, once all of the program's serve, with its settings."""
    program.wait_for("^all workers serve$", BOUND_S)
    lives = {
        worker: [re.search(SERVES.format(worker, "(?: again)?"), line) for line in program.lines]
        for worker in workers
    }
    return {
        worker: [life[2] for life in found if life is not None][-1]
        for worker, found in lives.items()
    }


def said(program: Program, pattern: str) -> list[str]:
    return [line for line in program.lines if re.search(pattern, line)]


def test_a_killed_supervisors_workers_are_found_by_the_next(supervise: Supervise) -> None:
    first = supervise()
    before = epochs(first, "prefill-0", "decode-0")
    first.process.send_signal(signal.SIGKILL)
    second = supervise()
    assert epochs(second, "prefill-0", "decode-0") == before
    assert said(second, "^found workers decode-0, prefill-0$")
    assert not said(second, "starting workers")

    # It looks after them as after its own.
    pid = int(said(second, SERVES.format("decode-0", ""))[0].partition("pid ")[2].split(",")[0])
    os.kill(pid, signal.SIGKILL)
    again = second.wait_for(SERVES.format("decode-0", " again"), BOUND_S)
    assert again[2] != before["decode-0"]
    assert not said(second, SERVES.format("prefill-0", " again"))


def test_a_changed_count_touches_no_other(supervise: Supervise) -> None:
    before = epochs(supervise(), "prefill-0", "decode-0")
    more = epochs(supervise("cluster.num_decode=2"), "prefill-0", "decode-0", "decode-1")
    assert {worker: more[worker] for worker in before} == before
    program = supervise()
    program.wait_for("^worker decode-1 has ended$", BOUND_S)
    assert epochs(program, "prefill-0", "decode-0") == before


def test_a_changed_role_ends_nobody(supervise: Supervise) -> None:
    before = epochs(supervise("cluster.num_decode=2"), "prefill-0", "decode-0", "decode-1")
    # One less here and one more there: who serves takes the other role, the next one knows of it.
    for _ in range(2):
        program = supervise("cluster.num_prefill=2")
        assert epochs(program, *before) == before
    assert not said(program, "it leaves|takes the role|has ended|starting")
    program = supervise()
    program.wait_for("^worker decode-1 has ended$", BOUND_S)
    assert epochs(program, "prefill-0", "decode-0").items() <= before.items()


Scale = Callable[..., tuple[int, str]]


@pytest.fixture
def scale(address: str, folder: Path) -> Scale:
    """`disagg scale`, as an operator runs it: its exit code and all that it said."""

    def run(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "disagg.commands", "scale", "--ray-address", address]
        ended = subprocess.run(
            [*command, *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=BOUND_S,
        )
        return ended.returncode, ended.stdout

    return run


def test_scaled_by_hand_while_it_runs_and_after_a_restart(
    supervise: Supervise, scale: Scale
) -> None:
    program = supervise()
    before = epochs(program, "prefill-0", "decode-0")
    code, said_there = scale("--decode", "2")
    assert code == 0, said_there
    assert (
        "wanted, by disagg scale: prefill 1, decode 2; serving: decode 2, prefill 1" in said_there
    )
    more = epochs(program, "prefill-0", "decode-0", "decode-1")
    assert before.items() <= more.items()

    # Another role: nobody ends, and the other count stays. It outlives the supervisor.
    code, said_there = scale("--prefill", "2", "--decode", "1")
    assert code == 0, said_there
    program.wait_for("^worker decode-1 takes the role prefill$", BOUND_S)
    program = supervise()
    assert epochs(program, *more) == more
    assert said(program, "^wanted, by disagg scale: prefill 2, decode 1$")
    assert "serving: decode 1, prefill 2" in scale()[1]

    code, said_there = scale("--reset")
    assert code == 0, said_there
    assert "wanted, by settings: prefill 1, decode 1; serving: decode 1, prefill 1" in said_there
    program.wait_for("^worker decode-1 has ended$", BOUND_S)
    assert not said(program, "serves again|(prefill-0|decode-0).* leaves")
    assert not said(program, "starting workers")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--prefill", "0", "--decode", "0"), "at least one worker"),
        (("--decode", "1025"), "--decode"),
        (("--both=-1",), "--both"),
        (("--reset", "--decode", "2"), "--reset"),
    ],
)
def test_counts_that_cannot_be_change_nothing(
    supervise: Supervise, scale: Scale, arguments: tuple[str, ...], named: str
) -> None:
    code, said_there = scale(*arguments)
    assert (code, named in said_there) == (2, True), said_there
    code, shown = scale()
    assert (code, "wanted, by settings: prefill 1, decode 1" in shown) == (0, True)
    assert "no supervisor" not in shown


def test_without_a_supervisor_it_says_so(supervise: Supervise, scale: Scale) -> None:
    supervise().end()
    code, said_there = scale("--decode", "2")
    assert code == 2
    assert "does disagg workers run?" in said_there
    assert scale("--reset", "--no-wait")[0] == 0
    assert "no supervisor runs" in scale()[1], "what is shown is what the last one left"
    epochs(supervise(), "prefill-0", "decode-0")


def test_changed_settings_replace_one_after_the_other(supervise: Supervise, folder: Path) -> None:
    before = epochs(supervise(), "prefill-0", "decode-0")
    for worker in before:
        (folder / f"drained-{worker}").unlink(missing_ok=True)
    program = supervise("worker.num_blocks=77")
    again = [SERVES.format(worker, " again") for worker in before]
    found = program.wait_for_all(again, BOUND_S)
    program.wait_for("^all workers serve$", BOUND_S)
    assert {match[2] for match in found}.isdisjoint(before.values())
    assert all((folder / f"drained-{worker}").exists() for worker in before)
    lines = [line for line in program.lines if "it leaves" in line or "serves again" in line]
    assert ["leaves" in line for line in lines] == [True, False, True, False]


def test_who_finds_no_place_is_reported_and_harms_nobody(supervise: Supervise) -> None:
    before = epochs(supervise(), "prefill-0", "decode-0")
    # Ray has one CPU here; these settings rename all workers, and the first one finds no place.
    program = supervise("cluster.num_cpus_per_worker=5")
    program.wait_for(r"^worker \S+: finds no place: it needs CPU 5 on one host", BOUND_S)
    others = said(program, "it leaves$")
    assert len(others) == 1
    assert len(before) == 2
    # And back: who was never touched is still the same.
    left = others[0].split()[1]
    (kept,) = [worker for worker in before if worker != left]
    assert epochs(supervise(), "prefill-0", "decode-0")[kept] == before[kept]


def test_a_crash_loop_waits_longer_and_longer(supervise: Supervise, folder: Path) -> None:
    before = epochs(supervise(), "prefill-0", "decode-0")
    (folder / "refuse-decode-1").touch()
    program = supervise("cluster.num_decode=2")
    program.wait_for(r"not to my taste; a new one in 0 s", BOUND_S)
    program.wait_for(r"not to my taste; a new one in 1 s", BOUND_S)
    program.wait_for(r"not to my taste; a new one in 2 s", BOUND_S)
    (folder / "refuse-decode-1").unlink()
    program.wait_for("^all workers serve$", BOUND_S)
    assert not said(program, SERVES.format("(prefill-0|decode-0)", " again"))
    assert epochs(supervise(), "prefill-0", "decode-0") == before


NODES = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
own = ray.get_runtime_context().get_node_id()
print(*(node["NodeID"] for node in ray.nodes() if node["Alive"] and "spare" in node["Resources"]))
"""


@pytest.fixture
def second_host(address: str, folder: Path) -> Iterator[tuple[Program, str]]:
    """Another node of Ray's on this machine, and its id."""
    command = [sys.executable, "-c", NODES, address]
    with ExitStack() as ends:
        program = join(address, folder, ends)
        found = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=True)
        node_id = found.stdout.strip()
        assert node_id, program.lines
        yield program, node_id


def join(address: str, folder: Path, ends: ExitStack) -> Program:
    """Start a node, again where Ray gives up: on a busy machine its own parts are late for it."""
    num_tried = 0
    while True:
        program = Program(
            "ray.scripts.scripts",
            *("start", f"--address={address}", "--block", "--num-cpus=2", "--disable-usage-stats"),
            *(f"--object-store-memory={80 << 20}", '--resources={"spare": 1}'),
            cwd=folder,
        )
        ends.callback(program.end)
        num_tried += 1
        try:
            program.wait_for("Ray runtime started", BOUND_S)
            return program
        except pytest.fail.Exception:
            if program.process.poll() is None or num_tried == JOINS_MAX:
                raise


def test_a_host_that_ray_drains_loses_its_workers_before_its_end(
    supervise: Supervise, second_host: tuple[Program, str], address: str, folder: Path
) -> None:
    host, node_id = second_host
    program = supervise()
    moved = program.wait_for("^worker (\\S+) moves to ", BOUND_S)[1]
    program.wait_for(SERVES.format(moved, " again"), BOUND_S)
    program = supervise()
    before = epochs(program, "prefill-0", "decode-0")
    drained = subprocess.run(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", address),
            *("--node-id", node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION"),
            *("--reason-message", "its time is over", "--deadline-remaining-seconds", "600"),
        ],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert drained.returncode == 0, drained.stderr
    left = program.wait_for("^worker (\\S+) leaves its host, which Ray drains$", BOUND_S)[1]
    assert left == moved
    program.wait_for(SERVES.format(left, " again"), BOUND_S)
    after = epochs(supervise(), "prefill-0", "decode-0")
    (stays,) = {"prefill-0", "decode-0"} - {left}
    assert after[stays] == before[stays]
    assert after[left] != before[left]
    assert (folder / f"drained-{left}").exists()

    host.end()  # nobody is there any more
    assert epochs(supervise(), "prefill-0", "decode-0") == after


RANKS = (
    "cluster.num_decode=0",
    "cluster.num_cpus_per_worker=0.3",
    "worker.tensor_parallel=2",
    "worker.tensor_parallel_backend=ray",
)


def test_what_was_reserved_for_a_worker_that_died_is_given_back(supervise: Supervise) -> None:
    """With three times 0.3 of one CPU there is no room for another one."""
    first = supervise(*RANKS)
    first.wait_for("^all workers serve$", BOUND_S)
    (*_, serves) = said(first, SERVES.format("prefill-0", "(?: again)?"))
    pid = re.search(r"pid (\d+)", serves)
    assert pid is not None
    first.process.send_signal(signal.SIGKILL)
    os.kill(int(pid[1]), signal.SIGKILL)
    supervise(*RANKS, "worker.num_blocks=64").wait_for("^all workers serve$", BOUND_S)


def test_without_its_cluster_the_supervisor_ends(supervise: Supervise, ray: Program) -> None:
    program = supervise()
    epochs(program, "prefill-0", "decode-0")
    tree = ray.tree()
    ray.process.kill()
    assert program.process.wait(BOUND_S) != 0
    wait_until_gone(tree)
