"""Ray on this machine, started and stopped here, or a cluster that exists.

Ray is imported inside the functions: it reads how to authenticate when it is imported.
"""

import contextlib
import functools
import logging
import math
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from disagg.cluster.processes import end_processes, find_children, find_descendants
from disagg.config import Settings
from disagg.errors import ClusterTokenError, ConfigError, ExpiredError
from disagg.telemetry.open_files import tight_limits

log = logging.getLogger(__name__)

NAMESPACE = "disagg"
_TLS_FILES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
_RETRY_S = 1.0
_ASK_S = 5.0
_TOO_SLOW = "timed out during startup"
"""Ray's error where its raylet is not there after 30 s, or an agent of it after 15: both are fixed,
and too short where a small machine is busy. A second start finds its files in memory."""
_END_S = 2.0


def num_workers(settings: Settings) -> int:
    """Number of workers in the settings."""
    cluster = settings.cluster
    return cluster.num_prefill + cluster.num_decode + cluster.num_both


def num_cpus(settings: Settings) -> float:
    """CPUs that Ray counts for all workers, and for ranks that it starts beside them."""
    worker = settings.worker
    beside = 0
    if worker.tensor_parallel_backend == "ray" and worker.device != "cuda":
        beside = worker.tensor_parallel if worker.tensor_parallel > 1 else 0
    return num_workers(settings) * (1 + beside) * settings.cluster.num_cpus_per_worker


def _at_most(settings: Settings) -> Settings:
    """The same with as many workers as the automatic mode may want."""
    most = {f"num_{role}": high for role, (_, high) in settings.autoscale.ranges.items()}
    return settings.model_copy(update={"cluster": settings.cluster.model_copy(update=most)})


def start_ray(settings: Settings, folder: Path) -> None:
    """Start a Ray cluster of this machine alone and connect to it.

    Where Ray gives up as its own parts are slow it is started again, until
    ``cluster.start_timeout_s`` is over.

    It asks for a token that only its own processes know: Ray takes 127.0.0.1 for the machine's own
    address, and listens on every interface.

    Args:
        settings: sizes are taken from it.
        folder: where sockets and logs go; short, a socket's path has at most 107 bytes.

    Raises:
        ConfigError: Ray could not be started, or was imported without token authentication; the
            working directory is gone; it is to use TLS without certificates.
    """
    _refuse_removed_directory()
    _refuse_missing_certificates()
    if "ray" in sys.modules and os.environ.get("RAY_AUTH_MODE") != "token":
        raise ConfigError("Ray is imported already; a local cluster has to be started before")
    _set_environment()
    os.environ["RAY_AUTH_MODE"] = "token"
    # Read once in a process's life: a second cluster has to use the same.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray

    def init() -> None:
        with _own_signals(), _own_process_groups():
            ray.init(
                address="local",  # whatever RAY_ADDRESS names
                num_cpus=max(1, math.ceil(num_cpus(_at_most(settings)))),
                object_store_memory=settings.cluster.object_store_mib << 20,
                include_dashboard=False,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.WARNING,
                _temp_dir=str(folder),
                _node_ip_address="127.0.0.1",
            )

    others = find_children(os.getpid())
    deadline = time.monotonic() + settings.cluster.start_timeout_s
    while True:
        try:
            init()
            return
        except Exception as error:  # Ray has many, and raises Exception itself where it is slow
            if _TOO_SLOW not in str(error) or time.monotonic() > deadline:
                reason = f"{error}{tight_limits()}"
                raise ConfigError(f"Ray did not start: {reason} (logs in {folder})") from error
        log.warning("Ray has not started in its own time, it is started again")
        ray.shutdown()
        end_processes(find_descendants(find_children(os.getpid()) - others), _END_S)


def join_ray(address: str, timeout_s: float) -> None:
    """Connect to a cluster, waiting for it while it starts.

    Authentication is what the environment sets (RAY_AUTH_MODE, RAY_AUTH_TOKEN); unset means none,
    so that a stray token file cannot turn it on for one node only.

    Args:
        address: of its head; "" stands for the one this machine belongs to.
        timeout_s: for its answer.

    Raises:
        ExpiredError: no cluster answered in time.
        ClusterTokenError: one asks for another token.
        ConfigError: the working directory is gone; Ray is to use TLS without certificates.
    """
    _refuse_removed_directory()
    _refuse_missing_certificates()
    _set_environment()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    import ray

    address = address or "auto"
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with _own_signals():
                _check_token(address)
                ray.init(
                    address=address,
                    namespace=NAMESPACE,
                    log_to_driver=True,
                    logging_level=logging.WARNING,
                )
            return
        except ray.exceptions.AuthenticationError:  # a token is to be sent, and there is none
            raise _no_token(address) from None
        except (ConnectionError, RuntimeError, ValueError) as error:
            if time.monotonic() > deadline:
                reason = str(error).strip().splitlines()[0]
                raise ExpiredError(
                    f"cluster.ray_address: no Ray cluster at {address}: {reason}",
                    param="cluster.ray_address",
                ) from error
            time.sleep(_RETRY_S)


def _check_token(address: str) -> None:
    """Ask a cluster, if there is one, whether it takes the token: Ray itself waits in any case.

    Raises:
        ClusterTokenError: it asks for another one.
        ConnectionError: there is none on this machine.
    """
    import grpc
    from ray._private.grpc_utils import init_grpc_channel
    from ray._private.services import canonicalize_bootstrap_address

    found = canonicalize_bootstrap_address(address)
    if found is None:
        return
    with init_grpc_channel(found) as channel:
        try:
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")(b"", timeout=_ASK_S)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise _no_token(address) from None


def _no_token(address: str) -> ClusterTokenError:
    return ClusterTokenError(
        f"cluster.ray_address: the token of the Ray cluster at {address} is missing or another "
        "one: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH as there",
        param="cluster.ray_address",
    )


def stop_ray() -> None:
    """Disconnect; a cluster that was started here ends. Does nothing when there is none."""
    if "ray" in sys.modules:
        import ray

        ray.shutdown()


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the handler of SIGTERM: Ray would put its own in its place.

    Where it does so all the same, its raises SystemExit, which means the same as the
    KeyboardInterrupt that ours raise.
    """
    from ray._private import utils

    its: Any = utils  # mypy takes no function for another one
    ours = signal.getsignal(signal.SIGTERM)
    plain = getattr(its, "set_sigterm_handler", None)  # a release without it is not changed
    its.set_sigterm_handler = lambda handler: None
    try:
        yield
    except SystemExit as ended:
        if ended.code == signal.SIGTERM:
            raise KeyboardInterrupt from ended
        raise
    finally:
        its.set_sigterm_handler = plain
        if callable(ours):
            signal.signal(signal.SIGTERM, ours)


@contextlib.contextmanager
def _own_process_groups() -> Iterator[None]:
    """Let each process that Ray starts meanwhile lead a group of its own.

    Else what is sent to this process's group (`timeout`, a terminal that is closed) ends Ray, too,
    before the workers are stopped; its library then waits for it for a minute, and gives up. Ray
    has no setting for it; a release that starts them in another way does as it did.
    """
    from ray._private import services

    starts: Any = services  # mypy takes no function for a class
    plain = getattr(starts, "ConsolePopen", None)
    if plain is None:
        yield
        return
    starts.ConsolePopen = functools.partial(plain, process_group=0)
    try:
        yield
    finally:
        starts.ConsolePopen = plain


def _refuse_removed_directory() -> None:
    """Raise ConfigError where the working directory is gone: Ray says that no file is there."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError("the working directory was removed: start in one that exists") from error


def _refuse_missing_certificates() -> None:
    """Raise ConfigError where Ray is to use TLS without them: its processes end, and it waits."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return
    if missing := [name for name in _TLS_FILES if not Path(os.environ.get(name, "")).is_file()]:
        raise ConfigError(
            f"RAY_USE_TLS={os.environ['RAY_USE_TLS']} needs files that are not there or not named: "
            f"set {', '.join(missing)}, or unset RAY_USE_TLS",
            param="RAY_USE_TLS",
        )


def _set_environment() -> None:
    """What Ray and the workers it starts read from the environment; given values win."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Read by a raylet that is started here; 15, Ray's default, lets everything else go first.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Ray would otherwise hide devices from actors that ask for none, and warn about it.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Workers' lines of log reach the supervisor's as they were written: they name their worker, and
    # may be JSON. Ray would begin each with colour codes, and hold back what two workers say alike.
    os.environ.setdefault("RAY_DISABLE_WORKER_LOG_PREFIX", "1")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
