"""The router processes of one host that share its ports: what each tells and asks the others."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import grpc

from disagg.errors import DisaggError
from disagg.router.inherited import SOCKET_SUFFIX, sibling_socket
from disagg.router.ports import REGISTRATION_BYTES_MAX
from disagg.wire.v1 import registration_pb2, sibling_pb2
from disagg.wire.v1.sibling_pb2_grpc import (
    SiblingServicer,
    SiblingStub,
    add_SiblingServicer_to_server,
)

if TYPE_CHECKING:
    from disagg.wire.v1.sibling_pb2_grpc import SiblingAsyncStub  # only in the stub file

    Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
else:
    Context = grpc.aio.ServicerContext  # not subscriptable at run time

ANSWER_S = 2.0
"""A sibling that has not answered for so long is passed over."""
OPTIONS = (("grpc.max_receive_message_length", REGISTRATION_BYTES_MAX),)


class Siblings(SiblingServicer):
    """The others, by their sockets in one folder; each life of a process has one of its own.

    A worker's connection ends at one of the processes, which tells the others what the worker says.
    Used from one event loop.

    Args:
        folder: of the sockets, closed to other users; whoever starts the processes made it.
        take_in: takes a registration in, as if the worker had come here, or raises a DisaggError.
        find_record: the page of a request of a tenant as JSON, or b"".
    """

    def __init__(
        self,
        folder: str,
        take_in: Callable[[registration_pb2.RegisterRequest], None],
        find_record: Callable[[str, str], bytes],
    ) -> None:
        self._folder = Path(folder)
        self._own = sibling_socket(self._folder, os.getpid())
        self._take_in = take_in
        self._find_record = find_record
        self._channels: dict[Path, grpc.aio.Channel] = {}
        self._telling: dict[tuple[Path, str], asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Let the others find this process."""
        self._server = grpc.aio.server(options=OPTIONS)
        add_SiblingServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self._own}")
        await self._server.start()

    def tell(self, request: registration_pb2.RegisterRequest) -> None:
        """Let the others take a registration in; one that still has the last one is passed over."""
        for path in self._others():
            key = path, request.worker.worker_id
            if key not in self._telling:
                self._telling[key] = asyncio.create_task(self._tell(key, request))

    async def find_record(self, tenant: str, request_id: str) -> bytes:
        """What another process says of a request; b"" where none knows it."""
        asked = sibling_pb2.FindRecordRequest(tenant=tenant, request_id=request_id)
        found = await asyncio.gather(*(self._ask(path, asked) for path in self._others()))
        return next(filter(None, found), b"")

    async def stop(self) -> None:
        """Be found no more, ask nobody any more."""
        for task in self._telling.values():
            task.cancel()
        await asyncio.gather(*self._telling.values(), return_exceptions=True)
        for channel in self._channels.values():
            await channel.close(None)
        await self._server.stop(grace=None)
        self._own.unlink(missing_ok=True)

    async def Register(
        self, request: registration_pb2.RegisterRequest, context: Context
    ) -> registration_pb2.RegisterResponse:
        """Take in what a worker has said to a sibling."""
        try:
            self._take_in(request)
        except DisaggError as error:
            await context.abort(grpc.StatusCode[error.grpc_status])
        return registration_pb2.RegisterResponse()

    async def FindRecord(
        self, request: sibling_pb2.FindRecordRequest, context: Context
    ) -> sibling_pb2.FindRecordResponse:
        """Look for a request here."""
        found = self._find_record(request.tenant, request.request_id)
        return sibling_pb2.FindRecordResponse(record=found)

    async def _tell(self, key: tuple[Path, str], request: registration_pb2.RegisterRequest) -> None:
        path, _ = key
        try:
            await self._stub(path).Register(request, timeout=ANSWER_S)
        except grpc.aio.AioRpcError:
            # It logs what it refuses; one that is gone will not come back under this path.
            if not path.exists() and (channel := self._channels.pop(path, None)) is not None:
                await channel.close(ANSWER_S)
        finally:
            del self._telling[key]

    async def _ask(self, path: Path, asked: sibling_pb2.FindRecordRequest) -> bytes:
        try:
            return (await self._stub(path).FindRecord(asked, timeout=ANSWER_S)).record
        except grpc.aio.AioRpcError:
            return b""  # one that is gone has taken its records along

    def _others(self) -> list[Path]:
        return [path for path in self._folder.glob(f"*{SOCKET_SUFFIX}") if path != self._own]

    def _stub(self, path: Path) -> "SiblingAsyncStub":
        if path not in self._channels:
            self._channels[path] = grpc.aio.insecure_channel(f"unix:{path}", options=OPTIONS)
        return cast("SiblingAsyncStub", SiblingStub(self._channels[path]))
