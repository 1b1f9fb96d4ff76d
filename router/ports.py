"""A router's ports: for clients, for operators, for workers; all bound, or none."""

import contextlib
import socket
from dataclasses import dataclass

import grpc

from disagg.errors import ConfigError
from disagg.router.http_server import bind
from disagg.router.inherited import Inherited
from disagg.router.options import RouterOptions
from disagg.telemetry.open_files import files_left
from disagg.tls.connections import Connections
from disagg.tls.handlers import Interceptor

REGISTRATION_BYTES_MAX = 16 << 20
"""However small the bodies of clients have to be."""
CALLS_PER_REQUEST = 4
"""So many times `requests_max` may go on in one connection: a call of which only the head has come
is bounded by nothing else, and who asks for more than there is room for is to be told so."""
GRPC_OPTIONS = (
    # Of each request that is not asked for yet; gRPC would take megabytes where they come fast.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 64 << 10),
    # Workers ping idle channels every few seconds; gRPC's default would cut them off for it.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Who has gone without a word, its machine and all, is noticed; gRPC would ask after two hours.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


@dataclass(frozen=True, slots=True)
class Ports:
    """Bound; nobody listens yet.

    Attributes:
        http: socket of the clients' port.
        admin: of the operators'.
        grpc_server: to be started, of the workers' port.
        grpc_port: its number.
    """

    http: socket.socket
    admin: socket.socket
    grpc_server: grpc.aio.Server
    grpc_port: int


def bind_ports(
    options: RouterOptions,
    connections: Connections,
    inherited: Inherited | None,
    *interceptors: Interceptor,
) -> Ports:
    """Bind all ports; where one cannot be, the others are free again.

    Args:
        options: hosts and numbers; 0 for any free one.
        connections: what the workers' port is made of.
        inherited: the HTTP sockets, where another process has bound them.
        interceptors: of calls to the workers' port.

    Raises:
        ConfigError: a port is taken or the host is not ours.
    """
    with contextlib.ExitStack() as bound:
        bounds = options.send_buffer_bytes, options.send_timeout_ms
        if inherited is not None:
            http_socket, admin_socket = map(bound.enter_context, inherited.sockets())
        else:
            http_socket = bound.enter_context(
                bind("http_port", options.host, options.http_port, *bounds)
            )
            admin_socket = bound.enter_context(
                bind("admin_port", options.admin_host, options.admin_port, *bounds)
            )
        # Two routers on one port must be an error, not a lottery, unless one follows the other.
        reuse = ("grpc.so_reuseport", int(inherited is not None))
        num_left = files_left(options.connections_max)
        bytes_max = max(options.body_bytes_max, REGISTRATION_BYTES_MAX)
        bound_of_messages = ("grpc.max_receive_message_length", bytes_max)
        calls_max = CALLS_PER_REQUEST * options.requests_max
        bound_of_calls = ("grpc.max_concurrent_streams", calls_max)
        server = connections.server(
            (reuse, bound_of_messages, bound_of_calls, *GRPC_OPTIONS), num_left, interceptors
        )
        address = f"{bracketed(options.host)}:{options.grpc_port}"
        try:
            grpc_port = connections.listen(server, address)
        except RuntimeError as error:
            fault = f"cannot listen on {address}: {error}"
            raise ConfigError(fault, param="grpc_port") from error
        bound.pop_all()
    return Ports(http_socket, admin_socket, server, grpc_port)


def bracketed(host: str) -> str:
    """A host as it stands before a port."""
    return f"[{host}]" if ":" in host else host
