"""Registers the worker at its routers, again and again: a router that restarted learns of it."""

import asyncio
import logging
from typing import TYPE_CHECKING, cast

import grpc

from disagg.messages.registration import WorkerInfo
from disagg.wire.registration_codec import worker_info_to_wire
from disagg.wire.v1.router_pb2_grpc import RouterStub
from disagg.workers.channel import CHANNEL_OPTIONS

if TYPE_CHECKING:
    from disagg.wire.v1.router_pb2_grpc import RouterAsyncStub  # only in the stub file

log = logging.getLogger(__name__)

REGISTER_TIMEOUT_S = 5.0


async def keep_registered(address: str, info: WorkerInfo, heartbeat_ms: int) -> None:
    """Register with one router for ever; log the first failure and the first success after it."""
    request = worker_info_to_wire(info)
    logged = ""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = cast("RouterAsyncStub", RouterStub(channel))
        while True:
            try:
                await stub.Register(request, timeout=REGISTER_TIMEOUT_S)
                level, now = logging.INFO, "registered"
            except grpc.aio.AioRpcError as error:
                level = logging.WARNING
                now = f"not registered: {error.code().name}: {error.details()}"
            if now != logged:
                log.log(level, "router %s: %s", address, now)
                logged = now
            await asyncio.sleep(heartbeat_ms / 1000)
