"""A subscriber written for vLLM's KV events listens to a real worker."""

from pathlib import Path
from typing import Any

import msgpack
import zmq

from tests.checkpoints import make_checkpoint
from tests.process.harness import MODEL, Cluster

PROMPT = [1, *(20 + i * 37 % 200 for i in range(40))]


def read_events(socket: "zmq.Socket[bytes]") -> list[dict[str, Any]]:
    """All events that arrive until nothing does for a while; the numbers have no gap."""
    events: list[dict[str, Any]] = []
    numbers = []
    while socket.poll(10_000 if not events else 500):
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
        socket.connect(endpoint)
        socket.subscribe(b"")
        try:
            cluster.start(w0="both")
            cluster.client.completions.create(
                model=MODEL, prompt=PROMPT, max_tokens=1, temperature=0
            )
            events = read_events(socket)
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
