"""A subscriber written for vLLM's KV events listens to a real worker, and so does a router."""

import random
from pathlib import Path
from typing import Any

import msgpack
import zmq
from zmq.utils.monitor import recv_monitor_message

from disagg.wire.v1 import router_pb2, router_pb2_grpc
from tests.checkpoints import make_checkpoint
from tests.process.harness import MODEL, WAIT_S, Cluster, wait_until

PROMPT = [1, *(20 + i * 37 % 200 for i in range(40))]


BOUND_MS = 60_000


def wait_connected(monitor: "zmq.Socket[bytes]") -> None:
    """Until the subscriber is heard; what is published before is not for it."""
    while monitor.poll(BOUND_MS):
        if recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return
    raise AssertionError("the subscriber was not connected")


def read_events(socket: "zmq.Socket[bytes]", num_events: int) -> list[dict[str, Any]]:
    """So many events, and any that come with them; the numbers have no gap."""
    events: list[dict[str, Any]] = []
    numbers = []
    while socket.poll(BOUND_MS if len(events) < num_events else 500):
        topic, number, payload = socket.recv_multipart()
        assert topic == b""
        numbers.append(int.from_bytes(number, "big"))
        _, batch, rank = msgpack.unpackb(payload)
        assert rank == 0
        events += batch
    assert numbers == list(range(len(numbers)))
    return events


def test_a_request_is_announced(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "gemma3", window=32)
    logs = tmp_path / "logs"
    logs.mkdir()
    endpoint = f"ipc://{tmp_path}/events"
    cluster = Cluster(directory, logs, worker_options={"kv_events_endpoint": endpoint})
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        monitor = socket.get_monitor_socket()
        socket.connect(endpoint)
        socket.subscribe(b"")
        try:
            cluster.start(w0="both")
            wait_connected(monitor)
            cluster.client.completions.create(
                model=MODEL, prompt=PROMPT, max_tokens=1, temperature=0
            )
            events = read_events(socket, 6)
        finally:
            cluster.end()
    assert {event["type"] for event in events} == {"BlockStored"}
    kinds = [event["kv_cache_spec_kind"] for event in events]
    assert sorted(kinds) == ["full_attention"] + ["sliding_window"] * 5
    assert {event["group_idx"] for event in events} == set(range(6))
    for event in events:  # 41 tokens: two full blocks of 16
        assert event["token_ids"] == PROMPT[:32]
        assert (event["block_size"], event["parent_block_hash"]) == (16, None)
        assert event["block_hashes"] == events[0]["block_hashes"]
        assert len(event["block_hashes"]) == 2
        window = 32 if event["kv_cache_spec_kind"] == "sliding_window" else None
        assert event.get("kv_cache_spec_sliding_window") == window


def test_a_router_that_follows_events_knows_what_one_with_a_session_does(tmp_path: Path) -> None:
    """A worker with a small pool: of every prompt both ways tell the same, group by group."""
    directory = make_checkpoint(tmp_path / "model", "gemma3", window=32)
    logs = tmp_path / "logs"
    logs.mkdir()
    events, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    cluster = Cluster(
        directory,
        logs,
        worker_options={
            "kv_events_endpoint": events,
            "kv_events_replay_endpoint": replay,
            "num_blocks": 160,
        },
        router_options={"kv_event_endpoints": (f"w0={events}?replay={replay}",)},
    )
    draw = random.Random(5)
    prompts: list[list[int]] = []
    try:
        cluster.start(w0="both")
        with cluster.channel(cluster.grpc_address) as channel:
            stub = router_pb2_grpc.RouterStub(channel)

            def told(prompt: list[int]) -> tuple[list[Any], list[Any]]:
                request = router_pb2.MatchRequest(model=MODEL, token_ids=prompt)
                found = stub.Match(request, timeout=WAIT_S)
                return tuple(  # type: ignore[return-value]
                    [(one.usable_tokens, list(one.group_tokens)) for one in part]
                    for part in (found.workers, found.followed)
                )

            def all_equal() -> bool:
                return all(ours == theirs for ours, theirs in map(told, prompts))

            for number in range(12):
                begin = draw.choice(prompts)[: draw.randrange(200)] if prompts else []
                prompts.append([*begin, *(draw.randrange(20, 250) for _ in range(120))])
                cluster.client.completions.create(
                    model=MODEL, prompt=prompts[-1], max_tokens=1, temperature=0
                )
                # The sessions' events and the others take ways of their own.
                wait_until(all_equal, f"the same of {number + 1} prompts by both ways")
            held = [told(prompt)[0][0][0] for prompt in prompts]
    finally:
        cluster.end()
    assert held[-1] > 100
    assert any(tokens < len(prompt) // 2 for tokens, prompt in zip(held, prompts, strict=True)), (
        "nothing was evicted"
    )
