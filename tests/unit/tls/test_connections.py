"""Ports and channels: replaced certificates while they run, and addresses that may be bound."""

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from disagg.errors import ConfigError
from disagg.tls import connections
from disagg.tls.addresses import check_exposure, is_loopback, parse_ports
from disagg.tls.authority import NODE
from disagg.tls.certificate_files import CERTIFICATE_FILE, CertificateFiles
from disagg.tls.connections import Connections, _Offered, client_channel
from tests.unit.tls.strangers import create

METHOD = "/test/Echo"


async def echo(request: bytes, context: object) -> bytes:
    return request


async def serve(own: Connections, **more: Any) -> tuple[grpc.aio.Server, str]:
    """A server for nodes with one method; returns it and its address."""
    server = own.server(**more)
    handler = grpc.unary_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test", {"Echo": handler}),)
    )
    port = own.listen(server, "127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


def method_of(channel: grpc.aio.Channel) -> Any:
    return cast(Any, channel).unary_unary(METHOD)


async def reaches(own: Connections, address: str) -> bool:
    async with own.channel(address, (("grpc.use_local_subchannel_pool", 1),)) as channel:
        call = method_of(channel)(b"x", timeout=20)
        code = await call.code()
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE), await call.details()
    return code is grpc.StatusCode.OK


async def test_new_connections_take_new_certificates_and_old_ones_go_on(tmp_path: Path) -> None:
    folder = create(tmp_path / "cluster")
    old = Connections(str(folder))
    server, address = await serve(old)
    other = Connections(str(create(tmp_path / "other")))
    async with old.channel(address) as lasting:
        assert await method_of(lasting)(b"x", timeout=20) == b"x"
        assert not await reaches(other, address)
        for file in (tmp_path / "other" / NODE).iterdir():
            file.replace(folder / file.name)
        assert await reaches(other, address)  # the server has become one of theirs
        assert await method_of(lasting)(b"x", timeout=20) == b"x"
        assert await reaches(old, address)  # reads the same files
    await server.stop(0)


def test_a_certificate_is_given_once(tmp_path: Path) -> None:
    """gRPC frees the one before while another thread may begin a handshake with it."""
    folder = create(tmp_path / "cluster")
    offered = _Offered(CertificateFiles(folder))
    first = offered.certificate
    assert [offered.changed() for _ in range(3)] == [None] * 3
    for file in create(tmp_path / "other").iterdir():
        file.replace(folder / file.name)
    assert offered.changed() is not None
    assert offered.certificate != first
    assert [offered.changed() for _ in range(3)] == [None] * 3


@pytest.mark.parametrize("has_certificates", [True, False])
async def test_who_says_nothing_takes_no_more_than_the_ports_connections(
    tmp_path: Path, has_certificates: bool
) -> None:
    """Each of them is an open file; without a bound they take all that the process may have."""
    own = Connections(str(create(tmp_path)) if has_certificates else "")
    server, address = await serve(own, connections_max=3)
    async with own.channel(address) as lasting:
        assert await method_of(lasting)(b"x", timeout=20) == b"x"
        strangers = [await asyncio.open_connection(*address.split(":")) for _ in range(8)]
        ended: set[int] = set()

        async def wait(number: int) -> None:
            with contextlib.suppress(ConnectionError):
                while await strangers[number][0].read(100):
                    pass
            ended.add(number)

        waiting = [asyncio.create_task(wait(number)) for number in range(8)]
        while len(ended) < 6:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert await method_of(lasting)(b"x", timeout=20) == b"x"
    for task in waiting:
        task.cancel()
    for _, writer in strangers:
        writer.close()
    await server.stop(0)


async def test_who_proves_nothing_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_MS", 200)
    server, address = await serve(Connections(str(create(tmp_path))))
    reader, writer = await asyncio.open_connection(*address.split(":"))
    assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()
    await server.stop(0)


async def test_a_server_of_another_cluster_is_told_nothing(tmp_path: Path) -> None:
    ours, theirs = (Connections(str(create(tmp_path / name))) for name in ("ours", "theirs"))
    server, address = await serve(theirs)
    assert not await reaches(ours, address)
    assert await reaches(theirs, address)  # control
    await server.stop(0)


async def test_a_client_is_no_server(tmp_path: Path) -> None:
    """Its certificate is of the right authority, but nobody can stand in for a node with it."""
    folder = create(tmp_path)
    with pytest.raises(ConfigError, match="is for client"):
        Connections(str(folder.parent / "client"))
    with client_channel("127.0.0.1:1", str(folder.parent / "client")):
        pass


@pytest.mark.parametrize("has_certificates", [False, True])
async def test_nothing_goes_through_a_proxy(
    has_certificates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(create(tmp_path)) if has_certificates else ""
    own = Connections(folder)
    server, address = await serve(own)
    with socket.socket() as proxy:  # takes nobody
        proxy.bind(("127.0.0.1", 0))
        for name in ("grpc_proxy", "https_proxy", "http_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        for name in ("no_grpc_proxy", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        assert await reaches(own, address)
        with client_channel(address, folder) as channel:
            call = cast(Any, channel).unary_unary(METHOD)
            assert await asyncio.to_thread(call, b"x", timeout=20) == b"x"
    await server.stop(None)


async def test_plain_is_for_both_or_neither(tmp_path: Path) -> None:
    secured, plain = Connections(str(create(tmp_path))), Connections("")
    for ours, theirs in ((secured, plain), (plain, secured)):
        server, address = await serve(ours)
        assert not await reaches(theirs, address)
        assert await reaches(ours, address)
        await server.stop(0)


async def test_the_watch_warns_of_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for days, num_warnings in ((365, 0), (20, 1)):
        folder = create(tmp_path / str(days), days)
        caplog.clear()
        watch = asyncio.create_task(Connections(str(folder)).watch_expiry())
        await asyncio.sleep(0)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        assert len(caplog.messages) == num_warnings
        assert all(str(folder) in line and "expires on" in line for line in caplog.messages)
    assert (folder / CERTIFICATE_FILE).exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_certificate(host: str) -> None:
    assert is_loopback(host)
    check_exposure("worker.host", host, "", allow_insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "", "name.invalid"])
def test_any_other_address_does(host: str) -> None:
    with pytest.raises(ConfigError, match=r"disagg certificates create .*allow_insecure") as caught:
        check_exposure("worker.host", host, "", allow_insecure=False)
    assert caught.value.param == "worker.host"
    check_exposure("worker.host", host, "/somewhere", allow_insecure=False)
    check_exposure("worker.host", host, "", allow_insecure=True)


def test_ports_are_one_or_a_range() -> None:
    assert list(parse_ports("7100")) == [7100]
    assert list(parse_ports("7100-7102")) == [7100, 7101, 7102]
    assert list(parse_ports("0")) == [0]
    for wrong in ("", "x", "7102-7100", "65536", "0-5", "1-", "-1", "1-2-3"):
        with pytest.raises(ConfigError, match="is no port"):
            parse_ports(wrong)
