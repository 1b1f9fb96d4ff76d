"""Registers the worker at its routers, again and again: a router that restarted learns of it."""

import asyncio
import logging
from typing import TYPE_CHECKING, cast

import grpc

from disagg.messages.registration import WorkerInfo
from disagg.tls.connections import Connections
from disagg.wire.registration_codec import worker_info_to_wire
from disagg.wire.v1 import registration_pb2
from disagg.wire.v1.router_pb2_grpc import RouterStub
from disagg.workers.channel import CHANNEL_OPTIONS

if TYPE_CHECKING:
    from disagg.wire.v1.router_pb2_grpc import RouterAsyncStub  # only in the stub file

log = logging.getLogger(__name__)

REGISTER_TIMEOUT_S = 5.0


async def keep_registered(
    address: str, info: WorkerInfo, heartbeat_ms: int, connections: Connections
) -> None:
    """Register with one router for ever; log the first failure and the first success after it."""
    request = worker_info_to_wire(info)
    logged = ""
    while True:
        certificate = connections.certificate
        async with connections.channel(address, CHANNEL_OPTIONS) as channel:
            stub = cast("RouterAsyncStub", RouterStub(channel))
            # A channel keeps the certificate it was made with.
            while certificate is connections.certificate:
                level, now = await _register(stub, request, secured=certificate is not None)
                if now != logged:
                    log.log(level, "router %s: %s", address, now)
                    logged = now
                await asyncio.sleep(heartbeat_ms / 1000)


async def _register(
    stub: "RouterAsyncStub", request: registration_pb2.RegisterRequest, *, secured: bool
) -> tuple[int, str]:
    """Register once; returns what to log, and at which level."""
    try:
        await stub.Register(request, timeout=REGISTER_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        said = f"not registered: {error.code().name}: {error.details()}"
        if error.code() is grpc.StatusCode.ALREADY_EXISTS:
            return logging.ERROR, said
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            # Refused handshakes look like a router that is away.
            said += (
                " (if it runs: are both certificates of one authority, see cluster.tls_directory?)"
                if secured
                else " (if it runs: has it a certificate, and this worker none?)"
            )
        return logging.WARNING, said
    return logging.INFO, "registered"
