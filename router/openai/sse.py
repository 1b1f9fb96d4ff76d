"""Compact JSON, and server-sent events of it."""

import json

DONE = b"data: [DONE]\n\n"
_encode = json.JSONEncoder(separators=(",", ":")).encode


def to_json(value: object) -> bytes:
    """Compact JSON; `json.dumps` would make an encoder each time."""
    return _encode(value).encode()


def sse(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"
