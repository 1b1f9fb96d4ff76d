"""Ports that the settings leave open are chosen where nobody else takes any meanwhile."""

import socket
from pathlib import Path

import pytest

from disagg.cluster import own_settings
from disagg.cluster.own_settings import decide_ports, open_ports
from disagg.config import Settings
from disagg.errors import ConfigError

OPEN = {"http_port": 0, "grpc_port": 0, "admin_port": 0}


def decided(**router: object) -> tuple[int, int, int]:
    found = decide_ports(Settings.model_validate({"router": OPEN | router})).router
    return found.http_port, found.grpc_port, found.admin_port


def test_they_are_none_that_the_system_gives_to_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as given_out:
        first = given_out.getsockname()[1]
    assert first not in open_ports()
    for _ in range(20):
        ports = decided()
        assert len(set(ports)) == len(ports)
        assert all(port in open_ports() for port in ports)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("32768\t60999\n", range(20_000, 32_768)),
        ("1024 65535", range(0)),
        ("", range(0)),
        ("x", range(0)),
        (None, range(0)),
    ],
)
def test_the_range_is_the_systems(text: str | None, expected: range, tmp_path: Path) -> None:
    file = tmp_path / "ip_local_port_range"
    if text is not None:
        file.write_text(text)
    assert open_ports(file) == expected


def test_one_that_is_in_use_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        monkeypatch.setattr(own_settings, "open_ports", lambda: range(port, port + 1))
        assert port not in decided()


def test_without_such_ports_any_free_one_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_settings, "open_ports", lambda: range(0))
    assert all(decided())


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(ConfigError, match=r"router\.http_port: 192\.0\.2\.1:0"):
        decided(host="192.0.2.1", allow_unauthenticated=True)


def test_several_processes_have_ports_in_a_row() -> None:
    assert decided(processes=3)[2] + 2 in open_ports()
