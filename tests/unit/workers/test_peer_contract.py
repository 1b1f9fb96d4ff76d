"""A worker of another layout is turned away when it dials, and told both contracts."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from disagg.messages.identity import Incarnation
from disagg.messages.registration import Contract
from disagg.tls.connections import Connections
from disagg.wire.peer_codec import peer_to_wire
from disagg.wire.stream_hello import PeerHello, PoolInfo
from disagg.wire.v1 import peer_pb2
from disagg.workers.peer_links import GrpcPeerLinks

ME, PEER = Incarnation("me", "M"), Incarnation("peer", "P")
OURS = Contract("f", "float32", ("g",), "pages", 64, 16, "h", 1, 1, layout_version=1)
POOLS = (PoolInfo(b"x", 0, 2, 64, "DRAM", 0),)


class AbortedError(Exception):
    """What a stream's handler meets when it aborts the stream."""


class Context:
    """Of a stream; it only ends."""

    async def abort(self, code: Any, details: str) -> None:
        raise AbortedError(details)


async def dialled_by(theirs: Contract) -> list[Incarnation]:
    """Whose hellos were taken, from a stream that ends behind one."""
    greeted: list[Incarnation] = []
    links = GrpcPeerLinks(
        ME,
        PeerHello(OURS, "127.0.0.1:1", POOLS),
        on_hello=lambda who, _: greeted.append(who),
        on_message=lambda *_: None,
        on_lost=lambda _: None,
        connections=Connections(""),
    )

    async def requests() -> AsyncIterator[peer_pb2.PeerEnvelope]:
        yield peer_to_wire(PEER, ME.epoch, PeerHello(theirs, "127.0.0.1:1", POOLS))

    context: Any = Context()
    try:
        async for _ in links.serve(requests(), context):
            pass
    finally:
        await links.close()
    return greeted


async def test_the_same_layout_is_let_in() -> None:
    assert await dialled_by(replace(OURS)) == [PEER]


@pytest.mark.parametrize("version", [0, 2])
async def test_another_layout_is_refused_with_both_contracts(version: int) -> None:
    theirs = replace(OURS, layout_version=version)
    with pytest.raises(AbortedError) as caught:
        await dialled_by(theirs)
    said = str(caught.value)
    assert f"layout_version: 1 != {version}" in said
    assert str(OURS) in said
    assert str(theirs) in said
