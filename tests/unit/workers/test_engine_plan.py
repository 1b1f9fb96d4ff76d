"""What a worker takes of its machine where nobody says, and what it refuses to take."""

from dataclasses import replace
from pathlib import Path

import pytest

from disagg.errors import ConfigError
from disagg.kv.shapes.memory_plan import plan_memory
from disagg.messages.identity import Incarnation
from disagg.scheduling.admission import SHORTEST_TOKENS, served_tokens_max
from disagg.workers import machine
from disagg.workers.core_of_options import build_core
from disagg.workers.engine_plan import plan_machine
from disagg.workers.engines.native.checkpoint import Checkpoint, open_checkpoint
from disagg.workers.engines.native.native_engine import NativeEngine
from disagg.workers.engines.native.plan import NativePlan, plan_native
from disagg.workers.machine import Memory, device_memory, num_cores
from disagg.workers.options import WorkerOptions
from tests.checkpoints import make_checkpoint
from tests.written_files import write_files

GIB = 1 << 30
OPTIONS = WorkerOptions("w", "both", "", "tiny", (), workers_per_host=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("plan")
    make_checkpoint(folder, "gemma3")
    return open_checkpoint(folder)


class Host:
    """A machine in figures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory = Memory(16 * GIB, 15 * GIB)
        self.gpu: Memory | None = None
        self.cores = 8
        monkeypatch.setattr(machine, "has_gpu", lambda: self.gpu is not None)
        monkeypatch.setattr(machine, "num_cores", lambda: self.cores)
        monkeypatch.setattr(
            machine, "device_memory", lambda device: self.memory if device == "cpu" else self.gpu
        )


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def pool_bytes(plan: NativePlan) -> int:
    return plan.pool.num_blocks * plan.pool.block_bytes


def test_a_host_without_gpu(host: Host, checkpoint: Checkpoint) -> None:
    plan = plan_native(replace(OPTIONS, max_sequences=10_000_000), checkpoint)
    assert (plan.machine.device, plan.machine.dtype, plan.machine.num_threads) == (
        "cpu",
        "float32",
        4,
    )
    # A quarter of this worker's half.
    assert 0 <= 2 * GIB - pool_bytes(plan) < plan.pool.block_bytes
    for said in (
        "cpu, float32, 4 threads",
        "8 cores, 2 workers",
        f"{plan.pool.num_blocks:,} KV blocks",
    ):
        assert said in plan.summary


def test_never_more_than_all_sequences_can_fill(host: Host, checkpoint: Checkpoint) -> None:
    options = replace(OPTIONS, max_sequences=3, max_model_tokens=100)
    plan = plan_native(options, checkpoint)
    specs = checkpoint.layer_specs(block_tokens=16, dtype_bytes=4)
    assert plan.pool.num_blocks == 1 + 3 * plan_memory(specs, GIB, 100).blocks_per_sequence
    assert "auto: 3 sequences of 100 tokens fill them" in plan.summary


def test_half_of_what_is_left_where_others_have_taken_much(
    host: Host, checkpoint: Checkpoint
) -> None:
    host.memory = Memory(16 * GIB, GIB)
    plan = plan_native(replace(OPTIONS, max_sequences=10_000_000), checkpoint)
    room = GIB - 4 * checkpoint.num_weights
    assert 0 <= room // 2 - pool_bytes(plan) < plan.pool.block_bytes


def test_a_tied_head_is_counted_twice_on_a_cpu(
    host: Host, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Packed for the head, plain for the embeddings."""
    tied = open_checkpoint(make_checkpoint(tmp_path, "qwen3", tie_word_embeddings=True))
    tied = replace(tied, num_weights=checkpoint.num_weights)
    options = replace(OPTIONS, max_sequences=10_000_000)
    host.memory = Memory(16 * GIB, GIB)
    room = GIB - 4 * (checkpoint.num_weights + tied.vocab_size * tied.config.hidden_size)
    plan = plan_native(options, tied)
    assert 0 <= room // 2 - pool_bytes(plan) < plan.pool.block_bytes
    host.gpu = host.memory
    plan = plan_native(options, tied)
    most = 0.9 * (GIB - 4 * checkpoint.num_weights)
    assert 0 <= most - pool_bytes(plan) <= plan.pool.block_bytes


@pytest.mark.parametrize("family", ["deepseek_v2", "glm4_moe_lite"])
def test_projections_from_latents_are_counted_twice(
    host: Host, family: str, tmp_path: Path
) -> None:
    latent = open_checkpoint(make_checkpoint(tmp_path, family))
    engine = NativeEngine(tmp_path, num_blocks=2)
    projections = [
        module.latent_projection
        for module in engine._model.modules()
        if hasattr(module, "latent_projection")
    ]
    copied = sum(one.to_keys.numel() + one.to_values.numel() for one in projections)
    assert copied > 0
    host.memory = Memory(16 * GIB, GIB)
    plan = plan_native(replace(OPTIONS, max_sequences=10_000_000), latent)
    room = GIB - 4 * (latent.num_weights + copied)
    assert 0 <= room // 2 - pool_bytes(plan) < plan.pool.block_bytes


def test_a_gpu_is_taken_and_shared(host: Host, checkpoint: Checkpoint) -> None:
    host.gpu = Memory(80 * GIB, 79 * GIB)
    options = replace(OPTIONS, max_sequences=1 << 40)
    for workers_per_gpu, room in ((1, 79 * GIB), (2, 40 * GIB)):
        plan = plan_native(replace(options, workers_per_gpu=workers_per_gpu), checkpoint)
        assert plan.machine.device == "cuda"
        most = 0.9 * (room - 4 * checkpoint.num_weights)
        assert 0 <= most - pool_bytes(plan) <= plan.pool.block_bytes


def test_the_type_of_the_weights(host: Host, checkpoint: Checkpoint) -> None:
    options = replace(OPTIONS, num_blocks=8)
    half = plan_native(options, replace(checkpoint, dtype="bfloat16"))
    whole = plan_native(options, checkpoint)
    assert (half.machine.dtype, 2 * half.pool.block_bytes) == ("bfloat16", whole.pool.block_bytes)
    with pytest.raises(ConfigError, match=r"worker\.dtype: the checkpoint's is 'F8_E4M3'"):
        plan_native(options, replace(checkpoint, dtype="F8_E4M3"))


def test_what_is_given_is_taken(host: Host, checkpoint: Checkpoint) -> None:
    host.gpu = Memory(80 * GIB, 79 * GIB)
    given = replace(OPTIONS, device="cpu", dtype="float16", num_threads=3, num_blocks=77)
    plan = plan_native(given, checkpoint)
    assert (
        plan.machine.device,
        plan.machine.dtype,
        plan.machine.num_threads,
        plan.pool.num_blocks,
    ) == ("cpu", "float16", 3, 77)


def test_a_pool_that_does_not_fit_is_refused_with_figures(
    host: Host, checkpoint: Checkpoint
) -> None:
    """It filled the memory once, block by block, until somebody killed it."""
    with pytest.raises(ConfigError) as refused:
        plan_native(replace(OPTIONS, num_blocks=2_000_000_000), checkpoint)
    block_bytes = plan_native(OPTIONS, checkpoint).pool.block_bytes
    fits = (8 * GIB - 4 * checkpoint.num_weights) // block_bytes
    for said in (
        "worker.num_blocks: 2,000,000,000 blocks of ",
        "the host has 16 GiB for 2 workers, 15 GiB available",
        f"at most {fits:,} fit",
    ):
        assert said in refused.value.message
    assert refused.value.param == "worker.num_blocks"
    plan_native(replace(OPTIONS, num_blocks=fits), checkpoint)  # control: so many do


@pytest.mark.parametrize("family", ["gemma3", "qwen3", "qwen3_5", "jamba", "gemma3n"])
def test_a_pool_for_no_request_is_refused_with_the_least_number(
    host: Host, family: str, tmp_path: Path
) -> None:
    """A worker registered, served nothing, and said so in a warning."""
    model = open_checkpoint(make_checkpoint(tmp_path, family))
    with pytest.raises(ConfigError) as refused:
        plan_native(replace(OPTIONS, num_blocks=1), model)
    assert refused.value.param == "worker.num_blocks"
    least = int(refused.value.message.rpartition(" ")[2])
    with pytest.raises(ConfigError, match=rf"{least - 1} are too few .*; at least {least}$"):
        plan_native(replace(OPTIONS, num_blocks=least - 1), model)
    options = replace(OPTIONS, model_dir=str(tmp_path), num_blocks=least)
    plan_native(options, model)
    engine = NativeEngine(tmp_path, num_blocks=least)
    core = build_core(Incarnation("w", "1"), options, engine, engine.layout, b"key", ())
    assert served_tokens_max(core.limits, core.kv) >= SHORTEST_TOKENS  # the core agrees


def test_weights_that_leave_nothing_are_told(host: Host, checkpoint: Checkpoint) -> None:
    host.memory = Memory(16 * GIB, 1 << 20)
    with pytest.raises(ConfigError, match=r"no memory is left for 7 KV blocks .* 1 MiB available"):
        plan_native(OPTIONS, replace(checkpoint, num_weights=1 << 18))


MEMINFO = {"proc/meminfo": "MemTotal: 1000 kB\nMemFree: 5 kB\nMemAvailable: 900 kB\nHugePages: 0\n"}
STAT = "anon 5\nactive_file 1024\ninactive_file 2048\n"
NO_LIMIT = "9223372036854771712\n"


def test_memory_of_a_host(tmp_path: Path) -> None:
    assert device_memory("cpu", write_files(tmp_path, MEMINFO)) == Memory(1000 << 10, 900 << 10)


def test_memory_of_a_container(tmp_path: Path) -> None:
    """The limit above counts as well as the own one; files are not held against it."""
    top = "sys/fs/cgroup"
    files = {
        "proc/self/cgroup": "0::/pod/box\n",
        f"{top}/pod/box/memory.max": "max\n",
        f"{top}/pod/box/memory.current": "8192\n",
        f"{top}/pod/memory.max": f"{500 << 10}\n",
        f"{top}/pod/memory.current": f"{100 << 10}\n",
        f"{top}/pod/memory.stat": STAT,
    }
    memory = device_memory("cpu", write_files(tmp_path, MEMINFO | files))
    assert memory == Memory(500 << 10, (500 - 100 + 3) << 10)


def test_memory_of_a_container_of_version_1(tmp_path: Path) -> None:
    box = "sys/fs/cgroup/memory/box"
    files = {
        "proc/self/cgroup": "4:memory:/box\n0::/\n",
        f"{box}/memory.limit_in_bytes": f"{500 << 10}\n",
        f"{box}/memory.usage_in_bytes": f"{100 << 10}\n",
        f"{box}/memory.stat": "active_file 7\ntotal_active_file 1024\ntotal_inactive_file 2048\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
    }
    memory = device_memory("cpu", write_files(tmp_path, MEMINFO | files))
    assert memory == Memory(500 << 10, (500 - 100 + 3) << 10)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 6),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 6),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 3),
        (
            {
                "proc/self/cgroup": "1:cpu,cpuacct:/\n",
                "sys/fs/cgroup/cpu,cpuacct/x": "",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            6,
        ),
    ],
)
def test_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    assert num_cores(write_files(tmp_path, files)) == cores


def test_a_gpu_that_is_missing_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    with pytest.raises(ConfigError, match=r"^worker\.device=cuda: torch finds no GPU$"):
        device_memory("cuda")


@pytest.mark.parametrize(
    ("changed", "cores", "is_warned"),
    [
        ({"tensor_parallel": 2}, 3, True),
        ({"tensor_parallel": 2}, 4, False),
        ({"tensor_parallel": 1}, 1, False),
        ({"tensor_parallel": 2, "device": "cuda"}, 3, False),
        ({"tensor_parallel": 2, "tensor_parallel_backend": "ray"}, 3, False),
    ],
)
def test_more_ranks_than_cores_are_warned_of(
    host: Host,
    caplog: pytest.LogCaptureFixture,
    changed: dict[str, object],
    cores: int,
    *,
    is_warned: bool,
) -> None:
    """Of both workers of this host; where Ray starts ranks they may lie on others."""
    host.cores = cores
    summary = plan_machine(replace(OPTIONS, **changed), "float32").summary  # type: ignore[arg-type]
    said = (
        "worker.tensor_parallel=2 is slow here: 4 ranks, which wait for each other in every layer,"
        " share 3 cores"
    )
    assert (said in summary) == is_warned
    assert [record.getMessage() for record in caplog.records] == [said] * is_warned
