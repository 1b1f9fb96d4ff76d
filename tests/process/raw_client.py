"""A client that sends one request over a socket and can leave at any moment."""

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 60.0


class RawClient:
    """Iterate over it to read the answer, raw, to its end; `close` is what a client's death is."""

    def __init__(self, url: str, body: dict[str, Any], request_id: str = "held") -> None:
        where = urlsplit(url)
        assert where.hostname is not None
        self._socket = socket.create_connection((where.hostname, where.port or 80), TIMEOUT_S)
        data = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\n"
            f"host: {where.netloc}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(data)}\r\n"
            f"x-request-id: {request_id}\r\n"
            "connection: close\r\n\r\n"
        )
        self._socket.sendall(head.encode() + data)

    def __iter__(self) -> Iterator[bytes]:
        while data := self._socket.recv(65536):
            yield data
        self.close()

    def close(self) -> None:
        """Leave."""
        self._socket.close()
