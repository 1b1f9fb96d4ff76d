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
_HOST_FAULT = "the host is to be a name or an address, with or without a port"


def check_head(version: str, target: bytes, headers: Headers) -> None:
    """Refuse heads that the parser takes, and other programs on the way may read otherwise.

    Raises:
        RequestError: this is none of HTTP/1.1 or 1.0.
    """
    fault = _fault_of(version, target, headers)
    if fault:
        raise no_http(f": {fault}")


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
        raise no_http(f": {_HOST_FAULT}")
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


def _fault_of(version: str, target: bytes, headers: Headers) -> str:
    """What is wrong with a head, in words that hold nothing of it; "": nothing."""
    if version not in VERSIONS:
        return "its version is another one"
    if TARGET.fullmatch(target) is None:
        return "a target has visible ASCII characters alone, without #"
    names = [name for name, _ in headers]
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        return f"there are {len(hosts)} Host headers, one is needed"
    if not all(map(HOST.fullmatch, hosts)):
        return _HOST_FAULT
    # Who looks at keys on the way may take the first of two; here the last one would count.
    for name, shown in ((b"authorization", "Authorization"), (b"x-api-key", "X-Api-Key")):
        if names.count(name) > 1:
            return f"there is more than one {shown} header"
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and (codings != [b"chunked"] or version == "1.0"):
        return "Transfer-Encoding can be chunked alone, once, and in HTTP/1.1"
    if codings and b"content-length" in names:
        return "Content-Length and Transfer-Encoding exclude each other"
    return ""
