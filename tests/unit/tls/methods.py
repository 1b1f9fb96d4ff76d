"""Every method of every service of the wire contract, found in what was generated from it."""

import importlib
import pkgutil
from dataclasses import dataclass
from typing import Any

import grpc

import disagg.wire.v1

NOT_CONNECTED = "failed to connect to all addresses"
"""How gRPC begins what it says of a handshake that was refused."""
ANSWER_S = 20.0


@dataclass(frozen=True)
class Method:
    """One method, as gRPC calls it."""

    service: str
    name: str
    streams_requests: bool
    streams_responses: bool

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"

    def call(self, channel: grpc.Channel, timeout_s: float = ANSWER_S) -> grpc.StatusCode | None:
        """Call it with an empty message.

        Returns:
            How it ended, OK with the first response; None if there was no connection to call over.
        """
        kinds: dict[tuple[bool, bool], Any] = {
            (False, False): channel.unary_unary,
            (False, True): channel.unary_stream,
            (True, False): channel.stream_unary,
            (True, True): channel.stream_stream,
        }
        make = kinds[self.streams_requests, self.streams_responses]
        request = iter([b""]) if self.streams_requests else b""
        try:
            answer = make(self.path)(request, timeout=timeout_s)
            if self.streams_responses:
                next(answer, None)
                answer.cancel()
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return None if (error.details() or "").startswith(NOT_CONNECTED) else code
        return grpc.StatusCode.OK


def all_methods() -> list[Method]:
    """All methods in the generated modules, whatever services there are."""
    found = []
    for module in pkgutil.iter_modules(disagg.wire.v1.__path__):
        if not module.name.endswith("_pb2"):
            continue
        file = importlib.import_module(f"disagg.wire.v1.{module.name}").DESCRIPTOR
        for service in file.services_by_name.values():
            found += [
                Method(
                    service.full_name,
                    method.name,
                    method.client_streaming,
                    method.server_streaming,
                )
                for method in service.methods
            ]
    return found
