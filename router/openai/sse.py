"""Compact JSON, and server-sent events of it."""

import json

DONE = b"data: [DONE]\n\n"


def to_json(value: object) -> bytes:
    """Compact JSON."""
    return json.dumps(value, separators=(",", ":")).encode()


def sse(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"
