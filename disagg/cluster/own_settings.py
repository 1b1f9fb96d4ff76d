"""What `disagg serve` decides itself where the settings leave it open: ports, certificates."""

import contextlib
import random
import socket
from collections.abc import Callable, Container
from pathlib import Path

from disagg.config import Settings
from disagg.errors import ConfigError
from disagg.tls.authority import create_for_one_run

_TRIES = 100
_LOWEST = 20_000
"""Below are those of Ray's workers."""
_GIVEN_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
CERTIFICATES = "certificates"
"""In the folder of a run."""


def decide_ports(settings: Settings) -> Settings:
    """Settings whose open ports (0) are chosen, so that router and workers agree on them.

    Raises:
        ConfigError: a port is in use, or the host is not one of this machine's.
    """
    router = settings.router
    http_port = _port("router.http_port", router.host, router.http_port)
    grpc_port = _port("router.grpc_port", router.host, router.grpc_port, {http_port})
    admin_port = _admin_port(
        router.admin_host, router.admin_port, router.processes, {http_port, grpc_port}
    )
    decided = router.model_copy(
        update={"http_port": http_port, "grpc_port": grpc_port, "admin_port": admin_port}
    )
    return settings.model_copy(update={"router": decided})


def with_certificates(settings: Settings, folder: Path, report: Callable[[str], None]) -> Settings:
    """Settings with certificates of this run, unless others are set or none are wanted.

    Raises:
        ConfigError: they cannot be written.
    """
    cluster = settings.cluster
    if cluster.tls_directory or cluster.allow_insecure:
        return settings
    try:
        nodes = create_for_one_run(folder / CERTIFICATES)
    except OSError as error:  # no room on the disk
        raise ConfigError(f"{folder / CERTIFICATES}: {error.strerror}") from error
    report(f"certificates of this run are in {nodes.parent} (node, client)")
    with_them = cluster.model_copy(update={"tls_directory": str(nodes)})
    return settings.model_copy(update={"cluster": with_them})


def as_decided_before(settings: Settings, before: Settings) -> Settings:
    """Settings that leave to an earlier decision what they leave open."""
    ports = {
        name: getattr(before.router, name)
        for name in ("http_port", "grpc_port", "admin_port")
        if getattr(settings.router, name) == 0
    }
    cluster = settings.cluster
    if not (cluster.tls_directory or cluster.allow_insecure):
        cluster = cluster.model_copy(update={"tls_directory": before.cluster.tls_directory})
    kept = ports | {"processes": before.router.processes}
    router = settings.router.model_copy(update=kept)
    return settings.model_copy(update={"router": router, "cluster": cluster})


def _admin_port(host: str, port: int, num: int, taken: Container[int]) -> int:
    """The first of as many ports in a row as there are processes."""
    key = "router.admin_port"
    for _ in range(_TRIES):
        first = _port(key, host, port, taken)
        try:
            for number in range(1, num):
                _bindable(key, host, first + number)
        except (ConfigError, OverflowError):
            if port:
                raise
        else:
            return first
    raise ConfigError(f"{key}: no {num} free ports in a row were found", param=key)


def _port(key: str, host: str, port: int, taken: Container[int] = ()) -> int:
    """The port that is set, or one that is likely to be free still when the router listens.

    The system gives others out, to every connection that is opened meanwhile, and Ray opens many.
    """
    if port:
        return _bindable(key, host, port)
    for one in random.sample(open_ports(), min(_TRIES, len(open_ports()))):
        if one not in taken:
            with contextlib.suppress(ConfigError):
                return _bindable(key, host, one)
    return _bindable(key, host, 0)


def open_ports(given_out: Path = _GIVEN_OUT) -> range:
    """Ports that neither Ray nor the system gives out; none where its range leaves none.

    Args:
        given_out: the first and the last port that connections get, as Linux has it.
    """
    try:
        first = int(given_out.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 0
    return range(_LOWEST, first)


def _bindable(key: str, host: str, port: int) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"{key}: {host}:{port}: {error.strerror}", param=key) from error
        return int(probe.getsockname()[1])
