"""What starts the ranks: this process itself, processes of this host, or Ray on several hosts."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from disagg.errors import ConfigError
from disagg.workers.options import WorkerOptions

THIS_HOST = "127.0.0.1"
SOCKETS = "VLLM_RPC_BASE_PATH"
"""Where vLLM makes the sockets of its queues; the folder for temporary files, if it is not set."""
FOLDER_MAX = 40
"""A socket's name has 107 characters at most, of which the own folder and vLLM's name take 60."""


def executor_class(options: WorkerOptions, device: str) -> Any:
    """The executor of vLLM that an engine gets; vLLM has been imported.

    Raises:
        ConfigError: Ray cannot start ranks for this process.
    """
    if options.tensor_parallel == 1:
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        return UniProcExecutor
    if options.tensor_parallel_backend != "ray":
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        return MultiprocExecutor
    _check_room()
    if device == "cpu":
        from disagg.workers.engines.vllm.ray_on_cpu import CpuRayExecutor

        return CpuRayExecutor
    from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

    return RayExecutorV2


@contextmanager
def nameless_sockets(options: WorkerOptions) -> Iterator[None]:
    """Within it the queues of ranks on this host get sockets whose names are gone afterwards.

    vLLM never removes them: eight for each start of a worker of two ranks. An executor that is made
    has seen all of them connected, and nobody needs a name any more.
    """
    on_several_hosts = options.tensor_parallel_backend == "ray"  # they have no folder in common
    is_long = len(tempfile.gettempdir()) > FOLDER_MAX
    if options.tensor_parallel == 1 or on_several_hosts or is_long or SOCKETS in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="disagg-ranks-") as folder:
        os.environ[SOCKETS] = folder
        try:
            yield
        finally:
            del os.environ[SOCKETS]


def rank_host(options: WorkerOptions) -> str:
    """The address of this host that the ranks reach."""
    if options.tensor_parallel == 1 or options.tensor_parallel_backend != "ray":
        return THIS_HOST
    import ray

    host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return host


def _check_room() -> None:
    """Check that Ray has reserved room for ranks beside this process, where vLLM will find it."""
    import ray

    if not ray.is_initialized() or ray.util.get_current_placement_group() is None:
        raise ConfigError(
            "worker.tensor_parallel_backend=ray: Ray has reserved no room for ranks of this"
            " process; disagg serve and disagg workers have it done",
            param="worker.tensor_parallel_backend",
        )
