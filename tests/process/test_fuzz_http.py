"""Random requests at both HTTP ports of a real router with real workers and keys.

By the served OpenAPI documents (schemathesis), and raw bytes on the connection: no answer is a
fault of the server, each is one of those that its document has, a refusal names what it refuses,
nothing hangs, memory does not grow, and a request has the tokens it had before.
"""

import contextlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Any, cast
from urllib.parse import urlsplit

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from disagg.router.keys import hash_of, new_key
from tests.checkpoints import make_checkpoint
from tests.process.harness import Cluster, running, wait_until
from tests.process.served_model import ServedModel, assert_exact
from tests.process.test_fuzz_grpc import GROWTH_MAX, own_bytes

pytestmark = pytest.mark.timeout(600)

NUM = 8
"""Requests of each page and round."""
NUM_RAW = 60
"""Of raw ones at each port and round."""
ENDS_S = 30.0
"""A bound that only a hang reaches."""
LIMITS: dict[str, Any] = {
    "receive_timeout_ms": 1_000,
    "generation_tokens_max": 64,
    "choices_max": 8,
    "worker_silent_ms": 60_000,
}
NAMELESS = ("the body is not valid JSON", "the body must be a JSON object", "this is not HTTP/1.1")
"""Begin the refusals of what has no fields to name."""
RETRIED = (429, 503)
NEVER_ENDS = "GET /v1/disagg/events"
"""Nothing of it could be varied: it takes no parameter and no body."""
FUZZ = settings(
    deadline=None,
    database=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)


def check_answer(status: int, headers: Any, body: bytes) -> None:
    """What holds of every answer, whatever it answers."""
    assert status < 500, (status, body[:500])
    if status < 400 or not body:  # an answer to HEAD has none
        return
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert error["message"], error
    assert error["code"], error
    if status == 400 and not error["message"].startswith(NAMELESS):
        assert error["param"], error
    if status in RETRIED:
        assert int(headers["retry-after"]) > 0, (status, body)


def fuzz_document(url: str, key: str, num: int, start: int) -> Counter[tuple[str, int]]:
    """Ask every page of a port so often, with what its document allows and what not.

    Returns:
        How often each page answered with each status.
    """
    answered: Counter[tuple[str, int]] = Counter()
    document = httpx.get(f"{url}/openapi.json", headers=bearer(key), timeout=ENDS_S).json()
    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        page = cast(Any, found).ok()
        if page.label == NEVER_ENDS:
            continue
        for status in fuzz_page(page, url, key, num, start):
            answered[page.label, status] += 1
    return answered


def fuzz_page(page: Any, url: str, key: str, num: int, start: int) -> list[int]:
    """Ask one page so often; the statuses of its answers."""
    statuses = []
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)

    @seed(start)
    @settings(FUZZ, max_examples=num)
    @given(st.one_of(*(page.as_strategy(generation_mode=mode) for mode in modes)))
    def one(case: Any) -> None:
        shorten(case)
        answer = case.call(base_url=url, headers=bearer(key), timeout=ENDS_S)
        statuses.append(answer.status_code)
        check_answer(answer.status_code, headers_of(answer), answer.content)
        case.validate_response(answer, checks=CONFORMANCE)

    one()
    return statuses


CONFORMANCE = [
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


def headers_of(answer: Any) -> dict[str, str]:
    return {name.lower(): values[0] for name, values in answer.headers.items()}


def shorten(case: Any) -> None:
    """Less of what would compute for minutes, and mostly tokens that there are."""
    body = case.body
    if not isinstance(body, dict):
        return
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if type(body.get(name)) is int and body[name] > 64:
            body[name] %= 64
    for name in ("prompt", "tokens", "stop_token_ids"):
        if name in body:
            body[name] = small(body[name])


def small(value: Any) -> Any:
    if isinstance(value, list):
        return [small(one) for one in value]
    return value % VOCABULARY if type(value) is int and value > 1000 else value


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def raw_request(random: Random, key: str, paths: list[str]) -> bytes:
    """Bytes of a request with something wrong about its head, its framing or its JSON."""
    path = random.choice(paths).encode()
    body = random.choice(BODIES)
    framing = random.choice(
        [b"content-length: %d" % len(body)] * 6
        + [
            b"content-length: 5\r\ncontent-length: 7",
            b"content-length: -1",
            b"content-length: 99999999999999999999",
            b"content-length: +2",
            b"transfer-encoding: chunked",
            b"transfer-encoding: gzip, chunked",
            b"transfer-encoding: chunked\r\ncontent-length: 3",
            b"transfer-encoding: nonsense",
        ]
    )
    if b"chunked" in framing:
        size = random.choice([b"%x" % len(body)] * 3 + [b"-1", b"zz", b"f" * 17, b"", b"0x3"])
        body = size + b"\r\n" + body + random.choice([b"\r\n0\r\n\r\n", b"", b"\n0\n\n"])
    method = random.choice([b"POST"] * 8 + [b"GET", b"PUT", b"OPTIONS", b"P\x00", b"", b"HEAD"])
    version = random.choice([b"HTTP/1.1"] * 8 + [b"HTTP/1.0", b"HTTP/9.9", b"HTTP/2", b"", b"x"])
    fields = [
        b"host: a",
        b"connection: close",
        b"authorization: Bearer " + key.encode(),
        random.choice([b"content-type: application/json"] * 8 + [b"content-type: \xff", b""]),
        framing,
    ]
    if random.random() < 0.2:
        fields.append(random.choice(FIELDS))
    head = b" ".join((method, path, version)) + b"\r\n" + b"\r\n".join(fields) + b"\r\n\r\n"
    sent = head + body
    if random.random() < 0.1:
        at = random.randrange(len(sent))
        sent = sent[:at] + random.randbytes(random.randint(0, 3)) + sent[at + 1 :]
    return sent[: random.randrange(len(sent))] if random.random() < 0.05 else sent


VOCABULARY = 320
FIELDS = [
    b"x: " + b"y" * 20_000,
    b"\r\n".join(b"h%d: 1" % number for number in range(150)),
    b"no colon",
    b" folded: 1",
    b"x\x00y: 1",
    b"x-request-id: \xff\x00",
    b"x-request-id: ../../etc",
    b"authorization: Bearer \xff",
    b"origin: null",
    b"expect: 100-continue",
    b"upgrade: websocket\r\nconnection: upgrade",
]
_START = b'{"model": "tiny", "prompt": [5, 6], "max_tokens": 2, '
BODIES = [
    _START + b'"n": 1}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}',
    b"",
    b"\xff\xfe",
    b'\xef\xbb\xbf{"model": "tiny"}',
    b"{" * 50_000,
    b"[" * 100_000 + b"]" * 100_000,
    b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    _START + b'"chat_template_kwargs": ' + b'{"a":' * 150 + b"1" + b"}" * 150 + b"}",
    _START + b'"metadata": ' + b"[" * 190 + b"]" * 190 + b"}",
    _START + b'"temperature": NaN}',
    _START + b'"temperature": 1e999}',
    _START + b'"temperature": -Infinity}',
    _START + b'"seed": ' + b"9" * 5_000 + b"}",
    _START + b'"logit_bias": {"5": 1e400}}',
    _START + b'"logit_bias": {"' + b"5" * 5_000 + b'": 1}}',
    _START + b'"max_tokens": 1, "max_tokens": "two"}',
    _START + b'"prompt": "\\ud800"}',
    _START + b'"stop": ["\\udfff"]}',
    _START + b'"cache_salt": "\\ud83d"}',
    _START + b'"user": "\\ud800"}',
    _START + b'"cache_salt": "\\u0000\\uffff"}',
    b'{"model": "tiny", "prompt": "' + b"\xc3" + b'"}',
    b'{"model": "tiny", "prompt": "\\u0000"}',
    b'{"model": "tiny", "prompt": ["", ""]}',
    b'{"model": "\\ud800", "prompt": "a"}',
    b'{"prompt": "' + "\U0001f600".encode() * 2_000 + b'"}',
    b'{"tokens": [5, 9223372036854775808]}',
    b'{"tokens": [-0]}',
    b"null",
    b'"text"',
    b"1e5",
]


def raw_call(url: str, sent: bytes) -> int:
    """Send bytes and read the answer to its end.

    Returns:
        Its status; 0 where the connection was closed without one.
    """
    where = urlsplit(url)
    client = socket.create_connection((where.hostname, where.port or 80), ENDS_S)
    with client, contextlib.suppress(ConnectionError):
        with contextlib.suppress(ConnectionError):  # it may answer and close before it has all
            client.sendall(sent)
        answer = HTTPResponse(client, method="GET" if sent[:4] != b"HEAD" else "HEAD")
        try:
            answer.begin()
            body = answer.read()
        except (HTTPException, ConnectionError):
            return 0
        headers = {name.lower(): value for name, value in answer.getheaders()}
        try:
            check_answer(answer.status, headers, body)
        except AssertionError as error:
            error.add_note(repr(sent[:2_000]))
            raise
        return answer.status
    return 0


def fuzz_raw(url: str, key: str, paths: list[str], num: int, start: int) -> Counter[int]:
    """Send a port so many raw requests."""
    answered: Counter[int] = Counter()

    @seed(start)
    @settings(FUZZ, max_examples=num)
    @given(st.randoms(use_true_random=True))
    def one(random: Random) -> None:
        answered[raw_call(url, raw_request(random, key, paths))] += 1

    one()
    return answered


PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"]
ADMIN_PATHS = [
    "/reset_prefix_cache",
    "/v1/disagg/requests/%ff?tenant=%00",
    "/v1/disagg/workers?x=" + "y" * 100,
    "/metrics",
    "http://a/health",
    "*",
    "/\u00ff",
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    folder = tmp_path_factory.mktemp("fuzz")
    model_dir = make_checkpoint(folder / "model", "gemma3", window=32)
    key = new_key()
    scopes = ["serve", "observe", "admin"]
    entry = {"name": "fuzz", "tenant": "fuzz", "sha256": hash_of(key), "scopes": scopes}
    keys = json.dumps({"keys": [entry]})
    house = Cluster(model_dir, folder, {"max_sequences": 4}, LIMITS | {"api_keys": keys}, key=key)
    with running(house, p0="prefill", d0="decode"):
        yield ServedModel(house)


def a_round(served: ServedModel, start: int) -> dict[str, int]:
    """Everything once, from a seed.

    Returns:
        Bytes of memory that each process has afterwards.
    """
    cluster, began = served.cluster, time.monotonic()
    for url, paths in ((cluster.url, PATHS), (cluster.admin_url, ADMIN_PATHS)):
        answered = fuzz_document(url, cluster.key, NUM, start)
        raw = fuzz_raw(url, cluster.key, paths, NUM_RAW, start)
        print(dict(answered), dict(raw), f"{time.monotonic() - began:.0f} s")
        assert any(status == 200 for _, status in answered)
        assert set(raw) & {200, 400, 404, 405}
    processes = {"router": cluster.router, **cluster.workers}
    for name, process in processes.items():
        assert process.popen.poll() is None, f"{name} ended: {process.logged()[-3000:]}"
        assert "Traceback" not in process.logged(), (name, process.logged()[-5000:])
    wait_until(
        lambda: cluster.http.get("/health").json()["num_requests"] == 0, "the router to be idle"
    )
    cluster.wait_quiescent()
    return {name: own_bytes(process) for name, process in processes.items()}


def test_any_request_at_both_ports(served: ServedModel) -> None:
    expected = served.prompt(40, 8)
    assert_exact(served.ask(expected), expected)
    before = a_round(served, 1)
    after = a_round(served, 2)
    print({name: f"{(after[name] - before[name]) / 2**20:.1f} MiB" for name in after})
    for name, size in after.items():
        assert size - before[name] < GROWTH_MAX, (name, before, after)
    assert_exact(served.ask(expected), expected)
    served.serve(served.prompt(60, 8))


FAULT = {"message": "x", "type": "invalid_request_error", "param": None, "code": "invalid_value"}
BROKEN: dict[str, tuple[int, Any]] = {
    "an exception": (500, {"error": FAULT | {"param": "x"}}),
    "no field": (400, {"error": FAULT}),
    "another form": (200, {"id": 5}),
    "a status of no document": (418, {"error": FAULT | {"param": "x"}}),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_page_is_found(how: str, served: ServedModel) -> None:
    status, body = BROKEN[how]
    document = served.cluster.http.get("/openapi.json").content

    class Broken(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            is_document = self.path == "/openapi.json"
            data = document if is_document else json.dumps(body).encode()
            self.send_response(200 if is_document else status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = answer

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Broken)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises((AssertionError, BaseExceptionGroup)):
            fuzz_document(f"http://127.0.0.1:{server.server_port}", "key", 3, 0)
    finally:
        server.shutdown()
        server.server_close()
