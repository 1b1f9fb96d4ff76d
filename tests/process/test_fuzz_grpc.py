"""Random messages and bytes at every method of every gRPC service, from a node and from strangers.

Whatever comes, the call ends with a status that says whose fault it was, both processes live, no
exception is in their logs, their memory does not grow, and a request has the tokens it had before.
"""

import contextlib
import importlib
import itertools
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, cast

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from disagg.messages.session import CLAIM_BYTES
from disagg.tls.authority import CLIENT, NODE
from disagg.tls.callers import CLIENT_METHODS
from disagg.tls.certificate_files import CA_FILE
from disagg.wire.v1 import (
    identity_pb2,
    peer_pb2,
    registration_pb2,
    session_pb2,
    worker_pb2_grpc,
)
from tests.checkpoints import make_checkpoint
from tests.process.harness import MODEL, Cluster, Process, running
from tests.process.random_messages import Known, message, spoilt
from tests.process.served_model import ServedModel, assert_exact
from tests.unit.tls.methods import all_methods
from tests.unit.tls.strangers import Caller, holder_of

pytestmark = pytest.mark.timeout(600)

ENDS_S = 20.0
"""A bound that only a hang reaches."""
OPEN_S = 1.0
"""So long a stream that nothing ends is read."""
NUM = 150
"""Calls of each method and round; a hundred take one to ten seconds."""
LINGER_S = 0.02
GROWTH_MAX = 32 << 20
"""Bytes that a process may have more after the second round than after the first one."""
ITS_FAULT = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNAVAILABLE,  # Generate while no worker takes the request
}
PEER = identity_pb2.Incarnation(worker_id="p0", epoch="of-fuzz")
KEY = identity_pb2.RequestKey(request_id="one", generation=1)
SPOILT = 0.1
"""Chance that a call sends what is no message."""
BATCHED = 0.3
"""Chance that one more message of a session goes with those before it."""
METHODS = {
    method.path: method for method in all_methods() if not method.service.endswith(".Sibling")
}
"""All that are served on a port."""
FUZZ = settings(
    deadline=None,
    database=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)


def descriptor(path: str) -> MethodDescriptor:
    """What the contract says of a method."""
    service, _, name = path[1:].rpartition("/")
    file = importlib.import_module(f"disagg.wire.v1.{service.rpartition('.')[2].lower()}_pb2")
    return file.DESCRIPTOR.services_by_name[service.rpartition(".")[2]].methods_by_name[name]


class Target:
    """A cluster, and what its processes believe to be sound."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.served = ServedModel(cluster)
        self.routers = (f"router-{number}:of-fuzz" for number in itertools.count())
        info = cluster.known()["d0"]["info"]
        self.contract = json_format.ParseDict(
            info["contract"], registration_pb2.Contract(), ignore_unknown_fields=True
        )
        self.worker = identity_pb2.Incarnation(**info["incarnation"])
        self.known: Known = {
            "worker_id": ["p0", "d0"],
            "epoch": [self.worker.epoch, "0" * 16],
            "reader_epoch": [self.worker.epoch],
            "addressee_epoch": [self.worker.epoch],
            "address": ["127.0.0.1:1", "127.0.0.1:70000"],
            "request_id": ["one", "another"],
            "generation": [1],
            "role": ["local", "prefill", "decode"],
            "model": [MODEL],
            "memory_kind": ["DRAM", "VRAM"],
            "kind": ["full_attention", "sliding_window"],
            "hashes": [b"h" * 32, b"h" * 64],
            "name": [b"c" * CLAIM_BYTES],
            "token_ids": [5, 20, 60],
            "max_tokens": [1, 3, 40],
            "num_prompt_tokens": [1],
            "temperature": [0.0, 1.0],
            "top_p": [1.0],
            "Contract": [self.contract],
            "Incarnation": [self.worker],
            "number": [1, 2],
            "request_number": [1, 2],
            "alignment_tokens": [16],
            "num_tokens": [16, 64],
            "num_blocks": [1, 2],
            "grammar": ["", '{"grammars": [{"json_schema": {}}]}'],
            "GroupInfo": [
                json_format.ParseDict(
                    group, registration_pb2.GroupInfo(), ignore_unknown_fields=True
                )
                for group in info["groups"]
            ],
            "PoolInfo": [
                peer_pb2.PoolInfo(
                    transport_metadata=data,
                    pool_address=4096,
                    num_blocks=8,
                    block_bytes=self.contract.block_bytes,
                    memory_kind="DRAM",
                )
                for data in (b"", b"no metadata", bytes(range(256)) * 4)
            ],
            "pools": [],
        }

    def processes(self) -> dict[str, Process]:
        return {"router": self.cluster.router, **self.cluster.workers}

    def address(self, path: str) -> str:
        is_router = ".Router/" in path
        return self.cluster.grpc_address if is_router else self.cluster.addresses["d0"]

    def requests(self, path: str, random: Random) -> list[bytes]:
        """What a caller may send: messages, or bytes that are none."""
        kind = descriptor(path).input_type
        if not METHODS[path].streams_requests:
            one: Any = message(random, kind, self.known)
            if hasattr(one, "token_ids") and random.random() < 0.9:
                one.ClearField(random.choice(["prompt", "token_ids"]))
            if path.endswith("/Generate") and random.random() < 0.9:
                for name in ("num_prompt_tokens", "eos_token_ids", "grammar"):  # the router's own
                    one.sampling.ClearField(name)
            data = one.SerializeToString()
            return [spoilt(random, data) if random.random() < SPOILT else data]
        make = self.envelope if path.endswith("/Peer") else self.session_request
        sent = [self.opening(path, random), *(make(random) for _ in range(random.randint(1, 12)))]
        parts = [each.SerializeToString() for each in sent]
        if random.random() < SPOILT:
            parts[-1] = spoilt(random, parts[-1])
        return parts

    def opening(self, path: str, random: Random) -> Message:
        """What begins a stream, most of the time as it should."""
        is_sound = random.random() < 0.9
        if path.endswith("/Peer"):
            hello: Any = message(random, peer_pb2.PeerHello.DESCRIPTOR, self.known)
            if is_sound:
                del hello.pools[1:]
                hello.contract.CopyFrom(self.contract)
            return self.addressed(peer_pb2.PeerEnvelope(hello=hello))
        opened: Any = session_pb2.SessionOpen(router_id=next(self.routers), worker=self.worker)
        if not is_sound:
            opened = message(random, opened.DESCRIPTOR, self.known)
        return session_pb2.SessionRequest(open=opened)

    def session_request(self, random: Random) -> Message:
        """Of a session; sometimes with others behind it, which rarely have some themselves."""
        request = self.one_session_request(random)
        while random.random() < BATCHED:
            more = self.one_session_request(random)
            if random.random() < SPOILT:
                more.more.append(self.one_session_request(random))
            request.more.append(more)
        return request

    def one_session_request(self, random: Random) -> session_pb2.SessionRequest:
        """A submit mostly has the fields of its role, and no others."""
        request: Any = message(random, session_pb2.SessionRequest.DESCRIPTOR, self.known)
        request.ClearField("more")
        if request.HasField("drain"):  # it would do so, and end
            request = session_pb2.SessionRequest(call_off_drain=session_pb2.CallOffDrain())
        if request.WhichOneof("message") == "open" and random.random() < 0.9:
            request = session_pb2.SessionRequest(cancel=session_pb2.Cancel(key=KEY))
        if request.WhichOneof("message") != "submit" or random.random() < 0.1:
            return cast(session_pb2.SessionRequest, request)
        submit = request.submit
        if submit.role == "local":
            submit.ClearField("peer")
        elif not submit.HasField("peer"):
            submit.peer.CopyFrom(session_pb2.PeerAddress(incarnation=PEER, address="127.0.0.1:1"))
        submit.ClearField("pull" if submit.role == "decode" else "take_over")
        return cast(session_pb2.SessionRequest, request)

    def envelope(self, random: Random) -> Message:
        """Of a peer's stream."""
        one = message(random, peer_pb2.PeerEnvelope.DESCRIPTOR, self.known)
        return one if random.random() < 0.05 else self.addressed(one)

    def addressed(self, one: Any) -> Message:
        """From the peer that the fuzz is, to this life of the worker."""
        one.sender.CopyFrom(PEER)
        one.addressee_epoch = self.worker.epoch
        return one


def lingering(sent: list[bytes]) -> Iterator[bytes]:
    """The requests of a stream; what they began goes on for a little before it ends."""
    yield from sent
    time.sleep(LINGER_S)


def call(caller: Any, path: str, sent: list[bytes]) -> tuple[grpc.StatusCode, str]:
    """Call a method with these requests, and read its answer to the end, or for `OPEN_S`."""
    method = METHODS[path]
    kinds: dict[tuple[bool, bool], Any] = {
        (False, False): caller.unary_unary,
        (False, True): caller.unary_stream,
        (True, True): caller.stream_stream,
    }
    make = kinds[method.streams_requests, method.streams_responses]
    request: Any = lingering(sent) if method.streams_requests else sent[0]
    endless = path.endswith("/KvEvents")
    timeout_s = OPEN_S if endless else ENDS_S
    try:
        answer = make(path)(request, timeout=timeout_s)
        if method.streams_responses:
            for _ in answer:
                if endless:
                    answer.cancel()
                    break
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        if endless and code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return grpc.StatusCode.OK, "nothing new"
        return code, error.details() or ""
    return grpc.StatusCode.OK, ""


def own_bytes(process: Process) -> int:
    """Memory of a process that is its own, without what is mapped of files."""
    for line in Path(f"/proc/{process.popen.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("fuzz")
    model_dir = make_checkpoint(folder / "model", "gemma3", window=32)
    worker = {"max_sequences": 4, "reservation_ttl_ms": 2_000}
    house = Cluster(model_dir, folder, worker, {"worker_silent_ms": 60_000})
    with running(house, p0="prefill", d0="decode"):
        yield Target(house)


def fuzz(
    channel: grpc.Channel,
    path: str,
    requests: Callable[[Random], list[bytes]],
    num: int,
    start: int,
) -> Counter[grpc.StatusCode]:
    """Call one method so often, beginning from a seed; how the calls ended."""
    ended: Counter[grpc.StatusCode] = Counter()

    @seed(start)
    @settings(FUZZ, max_examples=num)
    @given(st.randoms(use_true_random=True))
    def one(random: Random) -> None:
        sent = requests(random)
        code, details = call(channel, path, sent)
        ended[code] += 1
        assert code in ITS_FAULT | {grpc.StatusCode.OK}, (path, code, details, sent)

    one()
    return ended


def fuzz_all(target: Target, num: int, start: int) -> dict[str, int]:
    """Every method so often, beginning from a seed.

    Returns:
        Bytes of memory that each process has afterwards.
    """
    for path in sorted(METHODS):
        with target.cluster.channel(target.address(path)) as channel:
            ended = fuzz(channel, path, partial(target.requests, path), num, start)
        print(path, {code.name: times for code, times in ended.items()})
        for name, process in target.processes().items():
            assert process.popen.poll() is None, f"{name} ended: {process.logged()[-3000:]}"
            assert "Traceback" not in process.logged(), (name, process.logged()[-5000:])
    target.cluster.wait_quiescent()
    return {name: own_bytes(process) for name, process in target.processes().items()}


def test_a_node_that_says_anything(target: Target) -> None:
    expected = target.served.prompt(40, 8)
    assert_exact(target.served.ask(expected), expected)
    before = fuzz_all(target, NUM, 1)
    after = fuzz_all(target, NUM, 2)
    print({name: f"{(after[name] - before[name]) / 2**20:.1f} MiB" for name in after})
    for name, size in after.items():
        assert size - before[name] < GROWTH_MAX, (name, before, after)
    assert_exact(target.served.ask(expected), expected)
    target.served.serve(target.served.prompt(60, 8))


def test_strangers_are_not_read(target: Target) -> None:
    folder = Path(target.cluster.tls_directory).parent
    ca = (folder / NODE / CA_FILE).read_bytes()
    callers = {
        "no TLS": Caller(),
        "no certificate": Caller(ca),
        "client": holder_of(folder / CLIENT),
    }
    random = Random(1)
    for kind, path in itertools.product(callers, sorted(METHODS)):
        is_client = kind == "client"
        if is_client and path in CLIENT_METHODS:
            continue
        with callers[kind].channel(target.address(path)) as channel:
            for _ in range(5):
                code, _ = call(channel, path, target.requests(path, random))
                refused = "PERMISSION_DENIED" if is_client else "UNAVAILABLE"
                assert code.name == refused, (kind, path)
    for address in (target.cluster.grpc_address, target.cluster.addresses["d0"]):
        host, _, port = address.rpartition(":")
        for size in (1, 24, 5_000):
            raw = socket.create_connection((host, int(port)), ENDS_S)
            with raw, contextlib.suppress(ConnectionError):
                raw.sendall(random.randbytes(size))
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(65_536):
                    pass
    expected = target.served.prompt(40, 8)
    assert_exact(target.served.ask(expected), expected)


class Broken(worker_pb2_grpc.WorkerServicer):
    """Believes what it is sent."""

    def Status(self, request: Any, context: Any) -> Any:
        raise IndexError("an exception nobody catches")


def test_a_method_that_fails_is_found() -> None:
    server = grpc.server(ThreadPoolExecutor(4))
    broken: Any = Broken  # the other methods are never called
    worker_pb2_grpc.add_WorkerServicer_to_server(broken(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    path = "/disagg.wire.v1.Worker/Status"
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(AssertionError, match="UNKNOWN"):
                fuzz(channel, path, lambda random: [b""], 5, 0)
            with pytest.raises(AssertionError, match="INTERNAL"):  # of bytes that are no message
                fuzz(channel, path, lambda random: [b"\xff"], 5, 0)
    finally:
        server.stop(None)
