"""Where UCX, which moves the KV, may listen: its settings come from the environment alone."""

import logging
import os

from disagg.tls.addresses import is_loopback, parse_ports
from disagg.workers.options import WorkerOptions

log = logging.getLogger(__name__)

PORTS_VARIABLE = "UCX_TCP_PORT_RANGE"
DEVICES_VARIABLE = "UCX_NET_DEVICES"


def transfer_environment(options: WorkerOptions) -> dict[str, str]:
    """What has to be in the environment of a worker, and of its ranks, before NIXL starts."""
    found = {}
    ports = parse_ports(options.transfer_port)
    if ports.start:
        found[PORTS_VARIABLE] = f"{ports.start}-{ports[-1]}"
    # UCX would listen on every interface. Nobody from elsewhere can reach such a worker, unless
    # its ranks lie on other hosts.
    if is_loopback(options.host) and options.tensor_parallel_backend != "ray":
        found[DEVICES_VARIABLE] = "lo"
    return found


def set_transfer_environment(options: WorkerOptions) -> None:
    """Set it for this process and those it starts; what the operator has set goes before."""
    for name, value in transfer_environment(options).items():
        if os.environ.setdefault(name, value) != value:
            log.warning("%s=%s is used, not %s", name, os.environ[name], value)
