"""Ports of a worker: those that are set, on addresses that are allowed."""

import os
import socket
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from disagg.errors import ConfigError
from disagg.testing.scripted_worker import HASH_KEY
from disagg.workers.options import WorkerOptions
from disagg.workers.transfer_network import set_transfer_environment, transfer_environment
from disagg.workers.worker import Worker
from tests.unit.tls.strangers import create
from tests.unit.workers.engines.digest_engine import DigestEngine
from tests.unit.workers.lone_worker import NoTransport

OPTIONS = WorkerOptions("w", "both", "", "digest", (), hash_key=HASH_KEY)


def worker(**changed: Any) -> Worker:
    return Worker(
        replace(OPTIONS, **changed),
        engine_factory=lambda _: DigestEngine(8),
        transport_factory=lambda *_: cast(Any, NoTransport()),
    )


def free_ports(num: int) -> int:
    """The first of so many neighbouring ports that nobody uses now."""
    for first in range(23_000, 32_000, 10):
        try:
            with ExitStack() as taken:
                for port in range(first, first + num):
                    taken.enter_context(socket.create_server(("127.0.0.1", port)))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


def test_a_range_serves_several_workers_of_a_host() -> None:
    first = free_ports(2)
    ports = f"{first}-{first + 1}"
    started: list[Worker] = []
    try:
        for expected in (first, first + 1):
            started.append(worker(port=ports))
            started[-1].start()
            assert started[-1].address == f"127.0.0.1:{expected}"
        with pytest.raises(ConfigError, match=f"no port of {ports} is free"):
            worker(port=ports).start()
    finally:
        assert all(one.stop() for one in started)


def test_without_certificates_nothing_but_loopback_is_bound(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"worker\.host: 0\.0\.0\.0 can be reached"):
        worker(host="0.0.0.0").start()
    for allowed in ({"allow_insecure": True}, {"tls_directory": str(create(tmp_path))}):
        open_worker = worker(host="0.0.0.0", **allowed)
        open_worker.start()
        assert open_worker.stop()


def test_a_bad_certificate_stops_the_start_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path / "ca.crt")):
        worker(tls_directory=str(tmp_path)).start()


def test_ucx_listens_where_the_worker_can_be_reached() -> None:
    def of(**changed: Any) -> dict[str, str]:
        return transfer_environment(replace(OPTIONS, **changed))

    assert of() == {"UCX_NET_DEVICES": "lo"}
    assert of(host="192.0.2.1") == {}
    assert of(host="192.0.2.1", transfer_port="7200") == {"UCX_TCP_PORT_RANGE": "7200-7200"}
    ports = {"UCX_TCP_PORT_RANGE": "7200-7209"}
    assert of(transfer_port="7200-7209") == ports | {"UCX_NET_DEVICES": "lo"}
    assert of(tensor_parallel_backend="ray") == {}  # its ranks may lie on other hosts


def test_what_the_operator_has_set_goes_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "environ", environment := {"UCX_NET_DEVICES": "eth0"})
    set_transfer_environment(replace(OPTIONS, transfer_port="7200"))
    assert environment == {"UCX_NET_DEVICES": "eth0", "UCX_TCP_PORT_RANGE": "7200-7200"}
    assert "UCX_NET_DEVICES=eth0 is used, not lo" in caplog.text
