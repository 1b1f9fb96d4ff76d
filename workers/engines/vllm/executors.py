"""What starts the ranks: this process itself, processes of this host, or Ray on several hosts."""

import os
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from disagg.workers.left_folders import hold, remove_left
from disagg.workers.options import WorkerOptions

THIS_HOST = "127.0.0.1"
SOCKETS = "VLLM_RPC_BASE_PATH"
"""Where vLLM makes the sockets of its queues; the folder for temporary files, if it is not set."""
FOLDER = "disagg-ranks-"
"""How the name of the one that is made for them begins."""
REASON = "why-a-rank-failed"
"""What the first rank that failed at the start leaves there."""
_NO_WORD = (
    "the process of a rank ended before it was ready, perhaps killed for want of memory; what it"
    " said,"
)
LEFT_S = 60.0
"""A folder that nobody holds may be one that is only just made."""
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
    has seen all of them connected, and nobody needs a name any more. What starts that were killed
    have left is removed.
    """
    on_several_hosts = options.tensor_parallel_backend == "ray"  # they have no folder in common
    is_long = len(tempfile.gettempdir()) > FOLDER_MAX
    if options.tensor_parallel == 1 or on_several_hosts or is_long or SOCKETS in os.environ:
        yield
        return
    remove_left(Path(tempfile.gettempdir()), FOLDER, time.time(), LEFT_S)
    with tempfile.TemporaryDirectory(prefix=FOLDER) as folder:
        held = hold(Path(folder))
        os.environ[SOCKETS] = folder
        try:
            yield
        finally:
            del os.environ[SOCKETS]
            os.close(held)


@contextmanager
def reasons_of_ranks() -> Iterator[None]:
    """Within it a rank that fails has its own reason raised: vLLM says only that one has failed."""
    from ray.exceptions import ActorDiedError

    try:
        yield
    except ActorDiedError as error:  # what a rank of Ray's raises comes as another error
        raise RuntimeError(f"{_NO_WORD} logs/worker-*.err in Ray's folder have") from error
    except Exception as error:
        if "See stack trace" not in str(error):
            raise
        reason = Path(os.environ.get(SOCKETS, ""), REASON)
        if reason.is_file():
            raise RuntimeError(f"a rank failed: {reason.read_text()}") from error
        raise RuntimeError(f"{_NO_WORD} the log of this worker has") from error


@contextmanager
def leaves_its_reason() -> Iterator[None]:
    """In the process of a rank: what it raises is left for `reasons_of_ranks`."""
    try:
        yield
    except Exception as error:
        folder = Path(os.environ.get(SOCKETS, ""))
        if folder.name.startswith(FOLDER):  # the user's own is not cleared
            # The others fail with it, and say only that they have lost it.
            with suppress(FileExistsError), (folder / REASON).open("x") as file:
                file.write(said_by(error))
        raise


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


def said_by(error: BaseException) -> str:
    """What vLLM says, and our notes, in one line, without what pydantic and Ray put around it."""
    cause = getattr(error, "cause", None) or error  # Ray's: of what was raised in a rank
    said = str(cause)
    if hasattr(cause, "errors"):
        said = "; ".join(each["msg"].removeprefix("Value error, ") for each in cause.errors())
    said = " ".join(said.split()) or _place(cause)
    return " ".join([said, *getattr(cause, "__notes__", ())])


def _place(error: BaseException) -> str:
    """Where it was raised, with the source: an assertion of a weight's shape says nothing else."""
    frames = traceback.extract_tb(error.__traceback__)
    name = type(error).__name__
    if not frames:
        return name
    last = frames[-1]
    return f"{name} in {last.name} ({Path(last.filename).name}:{last.lineno}): {last.line}"
