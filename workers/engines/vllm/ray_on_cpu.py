"""vLLM's Ray executor on hosts without GPUs, where vLLM itself refuses: Ray counts no device there.

Three things in it name a device: what an actor asks Ray for, which placement groups will do, and
how an actor finds what it got. The placement group is given (`executor_class`), so nothing has to
be looked for; the others are said here, in this process and in those of the ranks.
"""

import os
from typing import Any

import ray
from vllm.distributed.device_communicators import cpu_communicator
from vllm.v1.executor import ray_executor_v2

BEFORE_IMPORT = (
    "VLLM_TARGET_DEVICE",
    "VLLM_CPU_OMP_THREADS_BIND",
    "OMP_NUM_THREADS",
    "TORCH_COMPILE_DISABLE",
)
"""What a rank's process has to have in its environment when it imports vLLM and torch."""


class CpuRayProcess(ray_executor_v2.RayWorkerProc):  # type: ignore[misc]
    """A rank's process: it has no device, and shares memory with ranks of its own host alone."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        """The node, and no device."""
        return ray.get_runtime_context().get_node_id(), []

    def initialize_worker(self, *args: Any, **kwargs: Any) -> None:
        """Load the model."""
        # vLLM takes ranks whose groups have one name for neighbours, and the name is a port number.
        shm, node = cpu_communicator._CPUSHMDistributed, ray.get_runtime_context().get_node_id()
        name_of = shm.make_group_name
        shm.make_group_name = staticmethod(lambda group: f"{name_of(group)}-{node[:16]}")
        super().initialize_worker(*args, **kwargs)


class CpuRayExecutor(ray_executor_v2.RayExecutorV2):  # type: ignore[misc]
    """See `disagg.workers.engines.vllm.executors`."""

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        return {}

    def _build_runtime_env(self) -> dict[str, Any]:
        environment = {name: os.environ[name] for name in BEFORE_IMPORT if name in os.environ}
        return {"env_vars": environment}

    def _init_executor(self) -> None:
        # The first bundle is this process's own.
        bundles = range(1, self.parallel_config.world_size + 1)
        os.environ["VLLM_RAY_BUNDLE_INDICES"] = ",".join(map(str, bundles))
        ray_executor_v2.RayWorkerProc = CpuRayProcess
        ray_executor_v2.initialize_ray_cluster = lambda *_, **__: None
        super()._init_executor()
