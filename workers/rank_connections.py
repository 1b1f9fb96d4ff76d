"""Connections of a worker's process with its ranks, on this host or on others."""

import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from disagg.errors import ConfigError
from disagg.workers.nixl_transport import START_TIMEOUT_S

TOKEN_BYTES = 32
RANK_BYTES = 4
GREETING_S = 5.0
"""A rank says who it is at once; nobody else may stay longer."""
ACCEPT_S = 0.1
VANISHED_S = 20
"""A host that vanished without a word is noticed after so long."""


@dataclass(frozen=True, slots=True)
class RankAddress:
    """Where the ranks connect, and the token that only they know: commands there are trusted."""

    host: str
    port: int
    token: bytes = field(repr=False)


def connect_rank(address: RankAddress, rank: int) -> "Connection[Any, Any]":
    """Connect a rank to its worker's process; said from the rank's process."""
    connecting = socket.create_connection((address.host, address.port), START_TIMEOUT_S)
    connecting.sendall(address.token + rank.to_bytes(RANK_BYTES))
    return _as_connection(connecting)


def accept_ranks(
    num_ranks: int, host: str, start: Callable[[RankAddress], object]
) -> "list[Connection[Any, Any]]":
    """Have every rank start its agent and connect; returns the connections in their order.

    Args:
        num_ranks: so many connect.
        host: an address of this host that the ranks reach.
        start: makes each of them a `RankAgent` at the address it gets; returns when all are made.

    Raises:
        ConfigError: not all have come; or what ``start`` raises.
    """
    found: dict[int, Connection[Any, Any]] = {}
    started: Future[object] = Future()

    def run() -> None:
        try:
            started.set_result(start(address))
        except BaseException as error:
            started.set_exception(error)

    with socket.create_server((host, 0), backlog=num_ranks) as server:
        server.settimeout(ACCEPT_S)
        address = RankAddress(host, server.getsockname()[1], secrets.token_bytes(TOKEN_BYTES))
        threading.Thread(target=run, name="starting ranks", daemon=True).start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while len(found) < num_ranks:
            if time.monotonic() > deadline:
                raise ConfigError(f"{len(found)} of {num_ranks} ranks have come")
            try:
                accepted, _ = server.accept()
            except TimeoutError:
                if started.done() and started.exception():
                    break
                continue
            rank = _greeting(accepted, address.token)
            if rank in range(num_ranks):
                found[rank] = _as_connection(accepted)
                deadline = time.monotonic() + START_TIMEOUT_S
            else:
                accepted.close()
        started.result(START_TIMEOUT_S)
    return [found[rank] for rank in range(num_ranks)]


def _greeting(accepted: socket.socket, token: bytes) -> int:
    """The rank that has connected; -1 for anybody else."""
    accepted.settimeout(GREETING_S)
    said = b""
    with contextlib.suppress(OSError):
        while len(said) < TOKEN_BYTES + RANK_BYTES:
            received = accepted.recv(TOKEN_BYTES + RANK_BYTES - len(said))
            if not received:
                break
            said += received
    if len(said) < TOKEN_BYTES + RANK_BYTES:
        return -1
    is_ours = hmac.compare_digest(said[:TOKEN_BYTES], token)
    return int.from_bytes(said[TOKEN_BYTES:]) if is_ours else -1


def _as_connection(connected: socket.socket) -> "Connection[Any, Any]":
    tcp = socket.IPPROTO_TCP
    connected.settimeout(None)
    connected.setsockopt(tcp, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, VANISHED_S // 4),
        (socket.TCP_KEEPINTVL, VANISHED_S // 4),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, VANISHED_S * 1000),
    ):
        connected.setsockopt(tcp, option, value)
    return Connection(connected.detach())
