"""A request's head: what HTTP/1.1 allows of it, and the parser alone does not ask for."""

import re

from disagg.errors import RequestError
from disagg.router.http_exchange import Headers

VERSIONS = ("1.1", "1.0")
TARGET = re.compile(rb"[\x21\x22\x24-\x7e]+")
HOST = re.compile(rb"(\[[\w:.%~-]+\]|[\w.~!$&'()*+;=%-]*)(:\d*)?[ \t]*")
"""A name or an address, with or without a port. A comma could be a name's, or make a list."""
ABSOLUTE = re.compile(rb"https?://(?=[^:/])([^/]*)", re.IGNORECASE)
"""How a target begins that is sent as to a proxy, with the host in it."""


def check_head(version: str, target: bytes, headers: Headers) -> None:
    """Refuse heads that the parser takes, and other programs on the way may read otherwise.

    Raises:
        RequestError: this is none of HTTP/1.1 or 1.0.
    """
    names = [name for name, _ in headers]
    hosts = [value for name, value in headers if name == b"host"]
    is_good = (
        version in VERSIONS
        and TARGET.fullmatch(target) is not None
        and (len(hosts) == 1 or (not hosts and version == "1.0"))
        and all(map(HOST.fullmatch, hosts))
    )
    # Who looks at keys on the way may take the first of two; here the last one would count.
    is_good &= all(names.count(name) < 2 for name in (b"authorization", b"x-api-key"))
    if b"transfer-encoding" in names:
        codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
        is_good &= codings == [b"chunked"] and version == "1.1" and b"content-length" not in names
    if not is_good:
        raise no_http()


def path_of(target: bytes) -> bytes:
    """The path in a target, which may name a host before it: in place of the header, says HTTP.

    Nothing here depends on either.

    Raises:
        RequestError: the host is none.
    """
    absolute = ABSOLUTE.match(target)
    if absolute is None:
        return target
    if not HOST.fullmatch(absolute[1]):
        raise no_http()
    return target[absolute.end() :] or b"/"


def check_line(line: bytes, came: bytes) -> None:
    """Refuse a request line that was another one than the parser took it for.

    It takes RTSP/1.1 for HTTP/1.1, and several spaces for one.

    Args:
        line: as it must have been.
        came: the head, behind empty lines at most.

    Raises:
        RequestError: this is none of HTTP/1.1 or 1.0.
    """
    if not came.lstrip(b"\r\n").startswith(line):
        raise no_http(": a request line is METHOD TARGET HTTP/1.1, with one space between each")


def no_http(more: str = "") -> RequestError:
    """The error of what is no request."""
    return RequestError(f"this is not HTTP/1.1 as it should be{more}")
