"""`disagg serve` as it is out of the box: every gRPC port of it against strangers.

Every method of every service of the wire contract is tried at every port: a service that is new
fails here until it says which process serves it.
"""

import ipaddress
import json
import os
import signal
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from disagg.tls.authority import CLIENT, NODE
from disagg.tls.callers import CLIENT_METHODS
from disagg.tls.certificate_files import CA_FILE, KEY_FILE
from tests.checkpoints import make_checkpoint
from tests.process.program import BOUND_S, Program, wait_until_gone
from tests.process.test_serve import ADMIN, ask, get, router_arguments
from tests.unit.tls.methods import ANSWER_S, all_methods
from tests.unit.tls.strangers import Caller, create, holder_of, strangers

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

SERVED_AT = {
    "disagg.wire.v1.Router": "router",
    "disagg.wire.v1.Worker": "worker",
    "disagg.wire.v1.Sibling": "a socket in a folder closed to others",
}
"""Which process serves each service; that of router processes of one host has no port."""
HEARD_S = 5.0
NOT_HEARD = {None, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED}
WORKER_PORTS, TRANSFER_PORTS = range(23_610, 23_620), range(23_630, 23_640)


def as_setting(ports: range) -> str:
    return f"{ports[0]}-{ports[-1]}"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Program]:
    make_checkpoint(tmp_path / "tiny", "gemma3")
    settings = ["worker.device=cpu", "scheduling.max_sequences=8"]
    settings += ["transfer.reserve_timeout_ms=30000"]  # a slow machine is no refusal
    settings += [f"worker.port={as_setting(WORKER_PORTS)}"]
    settings += [f"worker.transfer_port={as_setting(TRANSFER_PORTS)}"]
    given = [word for setting in settings for word in ("--set", setting)]
    ports = ["--http-port", "0", "--grpc-port", "0", "--set", "router.admin_port=0"]
    started = Program("disagg.commands", "serve", "--model", "tiny", *ports, *given, cwd=tmp_path)
    yield started
    started.end()


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports on which a process listens."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    lines = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines() for name in ("tcp", "tcp6")]
    for line in (*lines[0][1:], *lines[1][1:]):
        fields = line.split()
        if fields[9] in inodes and fields[3] == "0A":
            address, _, port = fields[1].partition(":")
            found.add((_host(address), int(port, 16)))
    return found


def _host(address: str) -> str:
    """An address from words of the machine's order, in hexadecimal digits."""
    words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
    found = ipaddress.ip_address(struct.pack(f"<{len(words)}I", *words))
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)


def codes(
    caller: Caller, address: str, service_at: str, timeout_s: float = ANSWER_S
) -> dict[str, grpc.StatusCode | None]:
    """How each method that this process serves ends for that caller."""
    ended = {}
    for method in all_methods():
        if SERVED_AT[method.service].startswith(service_at):
            with caller.channel(address) as channel:
                ended[method.path] = method.call(channel, timeout_s)
    return ended


def callers_to_refuse(folder: Path, directory: Path) -> dict[str, Caller]:
    """Strangers who know the cluster's authority; its key is nowhere, so nobody can be issued."""
    create(directory)
    foreign = strangers(directory)
    ca = (folder / NODE / CA_FILE).read_bytes()
    return {
        kind: Caller(ca, one.key, one.certificate) if one.trusts else one
        for kind, one in foreign.items()
    }


def test_a_service_without_a_port_is_noticed() -> None:
    assert {method.service for method in all_methods()} == set(SERVED_AT)


def test_no_port_answers_strangers(served: Program, tmp_path: Path) -> None:
    pids = [
        int(match[1])
        for match in served.wait_for_all(
            [rf"worker {name}-0 serves on \S+ \(pid (\d+)" for name in ("prefill", "decode")]
        )
    ]
    admin_url = served.wait_for(ADMIN)[1]
    url = served.wait_for(r"^serving tiny on (http://[\d.]+:\d+)/v1")[1]
    settings_file = Path(router_arguments(served)[-2])
    folder = settings_file.parent / "certificates"
    settings = yaml.safe_load(settings_file.read_text())
    assert settings["cluster"]["tls_directory"] == str(folder / NODE)
    rights = {path: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}
    assert {mode for path, mode in rights.items() if path.is_file()} == {0o600}
    assert {mode for path, mode in rights.items() if path.is_dir()} == {0o700}
    assert len([path for path in rights if path.name == KEY_FILE]) == 2
    assert not list(folder.rglob("ca.key"))

    _, body = get(admin_url, "/v1/disagg/workers")
    assert isinstance(body, dict)
    workers = [view["info"]["address"] for view in body["workers"]]
    places: list[tuple[str, str]] = [("worker", address) for address in workers]
    places.append(("router", f"127.0.0.1:{settings['router']['grpc_port']}"))
    assert {int(address.rpartition(":")[2]) for address in workers} <= set(WORKER_PORTS)
    for pid in pids:
        check_ports(pid)

    node, client = holder_of(folder / NODE), holder_of(folder / CLIENT)
    for place, address in places:
        for kind, stranger in callers_to_refuse(folder, tmp_path / "elsewhere").items():
            ended = codes(stranger, address, place)
            assert set(ended.values()) == {None}, (kind, address, ended)
        ended = codes(client, address, place)
        for path, code in ended.items():
            refused = code is grpc.StatusCode.PERMISSION_DENIED
            assert refused == (path not in CLIENT_METHODS), (path, code)
        # Control: it is heard, and told what is wrong; a stream of events says nothing.
        ended = codes(node, address, place, HEARD_S)
        assert not set(ended.values()) & NOT_HEARD, ended
        assert set(codes(node, address, "a socket").values()) == {grpc.StatusCode.UNIMPLEMENTED}
    check_leases(admin_url, folder)

    _, record = ask(url, admin_url, "after")  # none of them has done any harm
    (generation,) = record["generations"]
    assert sum(group["pulled_bytes"] for group in generation["transfer"]["groups"]) > 0

    tree = served.tree()
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(BOUND_S) == 0
    wait_until_gone(tree)
    assert not folder.parent.exists()


def check_ports(pid: int) -> None:
    """A worker listens where its settings say, on this machine alone."""
    found = listening(pid)
    grpc_ports = {place for place in found if place[1] in WORKER_PORTS}
    transfer = {place for place in found if place[1] in TRANSFER_PORTS}
    assert len(grpc_ports) == len(transfer) == 1, found
    assert {host for host, _ in grpc_ports | transfer} == {"127.0.0.1"}


def check_leases(admin_url: str, folder: Path) -> None:
    """The operator's view needs a node's certificate as well."""
    for given, answered in (("", False), (str(folder / NODE), True)):
        looking = Program(
            "disagg.commands", "leases", "--url", admin_url, "--json", "--tls-directory", given,
            cwd=folder,
        )  # fmt: skip
        assert looking.process.wait(BOUND_S) == int(not answered)
        looking.wait_for(r"^}$")
        start = looking.lines.index("{")
        shown: dict[str, Any] = json.loads("\n".join(looking.lines[start:]))
        assert {worker["answered"] for worker in shown["workers"]} == {answered}
