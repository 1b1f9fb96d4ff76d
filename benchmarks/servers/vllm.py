"""vLLM's own server on the CPU, as its users start it; what they leave at its default stays there.

`Plan.unhindered` undoes what makes vLLM slow on few cores and has nothing to do with its design:
threads that poll and spin (``unhindered/sitecustomize.py``), and model threads that are pinned, two
engines' to the same core. It is for measurements of time.
"""

import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.servers.program import Program, free_port

MODEL = "tiny"
BLOCK_TOKENS = 32
"""The fewest that its attention on the CPU takes."""
UNHINDERED = Path(__file__).parent / "unhindered"
FOR_REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What the client sends the prefill engine; its answer has what the decode engine is sent."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one engine is started with.

    Attributes:
        name: of its log.
        pool_gib: memory of the KV cache.
        num_blocks: of it; None for all that fit.
        hands_over: with the NixlConnector, as prefill or decode engine.
        lease_s: of the KV that the other engine reads; None for vLLM's default.
        engine_id: "" leaves it to vLLM, which takes a new one at every start.
        transports: of UCX; "" for its choice.
        device: network device of UCX.
        host: address it listens at.
        prefix: what its command line begins with.
    """

    name: str
    checkpoint: Path
    max_model_tokens: int
    max_sequences: int
    max_step_tokens: int = 512
    pool_gib: int = 1
    num_blocks: int | None = None
    unhindered: bool = False
    hands_over: bool = False
    lease_s: int | None = None
    engine_id: str = ""
    transports: str = ""
    device: str = "lo"
    host: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    side_port: int = field(default_factory=free_port)

    def command(self, python: Path) -> list[str]:
        """The command line of its server; see `benchmarks.servers.environment` for its form."""
        options: dict[str, object] = {
            "model": self.checkpoint,
            "served-model-name": MODEL,
            "host": self.host,
            "port": self.port,
            "dtype": "float32",
            "max-model-len": self.max_model_tokens,
            "max-num-seqs": self.max_sequences,
            "max-num-batched-tokens": self.max_step_tokens,
            "block-size": BLOCK_TOKENS,
        }
        if self.num_blocks is not None:
            options["num-gpu-blocks-override"] = self.num_blocks
        if self.hands_over:
            options["kv-transfer-config"] = json.dumps(self._transfer())
        flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        server = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
        return [*self.prefix, *server, *flags, "--enforce-eager"]

    def environment(self) -> dict[str, str]:
        """What vLLM and UCX read."""
        environment = {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": str(self.pool_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_HOST_IP": self.host,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": self.host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_port),
            "VLLM_NO_USAGE_STATS": "1",
            "UCX_NET_DEVICES": self.device,
        }
        if self.transports:
            environment["UCX_TLS"] = self.transports
        if self.unhindered:
            environment["PYTHONPATH"] = str(UNHINDERED)
        return environment

    def _transfer(self) -> dict[str, Any]:
        transfer: dict[str, Any] = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
        }
        if self.lease_s is not None:
            transfer["kv_connector_extra_config"] = {"kv_lease_duration": self.lease_s}
        if self.engine_id:
            transfer["engine_id"] = self.engine_id
        return transfer


class VllmServer(Program):
    """One server with its engine's processes."""

    def __init__(self, plan: Plan, python: Path, logs: Path) -> None:
        self.plan = plan
        super().__init__(
            plan.command(python),
            plan.environment(),
            logs / plan.name,
            f"http://{plan.host}:{plan.port}",
        )

    def wait_ready(self) -> None:
        """See `Program`."""
        super().wait_ready()
        if self.plan.unhindered:
            for process in self.processes():
                for task in Path(f"/proc/{process.pid}/task").glob("*"):
                    with contextlib.suppress(ProcessLookupError):  # it has just ended
                        os.sched_setaffinity(int(task.name), os.sched_getaffinity(0))
