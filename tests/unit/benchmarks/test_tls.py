"""The benchmark of TLS between nodes: its lines, and that one side has it and the other has not."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tls import __main__ as tls
from disagg.tls.authority import create_for_one_run
from disagg.tls.connections import Connections


async def test_every_figure_has_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONNECTIONS", "ROUND_TRIPS", "MESSAGES"):
        monkeypatch.setattr(tls, name, 3)
    lines = await tls.figures(1)
    assert [line["name"] for line in lines] == [
        "tls/connection and first call",
        "tls/message there and back",
        "tls/step of 64 sequences",
    ]
    for line in lines:
        assert isinstance(line["spread"], list)
        assert [len(line["spread"]), line["rounds"]] == [2, 1]
        assert line["ratio"]


async def test_what_is_compared_has_tls(tmp_path: Path) -> None:
    """A node with certificates and one without do not understand each other."""
    nodes = [tls.Node(str(create_for_one_run(tmp_path / "run"))), tls.Node("")]
    for node in nodes:
        await node.start()
    plain: Any = Connections("").channel(nodes[0]._address)
    call = plain.stream_stream("/benchmark/Back")()
    with pytest.raises(Exception, match="failed to connect"):
        await asyncio.wait_for(call.wait_for_connection(), 20)
    assert await nodes[0].connect_ms() > 0  # control
    for node in nodes:
        await node.stop()
