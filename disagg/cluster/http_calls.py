"""HTTP calls that may carry an API key: to the address that was given, and nowhere else."""

import io
import threading
import time
import urllib.request
from concurrent.futures import Future
from http.client import HTTPMessage
from typing import IO, Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request

from disagg.errors import ConfigError


class _NoRedirects(HTTPRedirectHandler):
    """Else urllib would send the key wherever an answer says."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        raise HTTPError(
            req.full_url, code, f"sends on to {newurl}, which is not asked", headers, fp
        )


_opener = urllib.request.build_opener(ProxyHandler({}), _NoRedirects)


def key_header(key: str, param: str) -> dict[str, str]:
    """The header that shows an API key, without the end of a line behind it; none where it is "".

    Args:
        key: as a variable or a file has it.
        param: where it is from.

    Raises:
        ConfigError: no header can have it. Its text is not said: the library's own error would,
            and ends in logs.
    """
    key = key.strip()
    try:
        key.encode("latin-1")
        is_sound = key.isprintable()
    except UnicodeEncodeError:
        is_sound = False
    if not is_sound:
        raise ConfigError(f"{param}: has characters that no API key has", param=param)
    return {"Authorization": f"Bearer {key}"} if key else {}


def open_call(request: Request, timeout_s: float) -> Any:
    """An answer's stream, as `urllib.request.urlopen` opens it; proxies and redirects are ignored.

    Args:
        request: with the key, where there is one.
        timeout_s: for each wait for bytes.

    Raises:
        OSError: nobody answers; an `HTTPError`: not with 200.
    """
    return _opener.open(request, timeout=timeout_s)


def call(request: Request, timeout_s: float, answer_bytes_max: int) -> bytes:
    """The body of an answer, cut at a size.

    Args:
        request: likewise.
        timeout_s: until all of it is there.
        answer_bytes_max: more is left out.

    Raises:
        OSError: likewise, or it is not there in time.
    """
    body: Future[bytes] = Future()
    ends_s = time.monotonic() + timeout_s

    def read() -> None:
        try:
            body.set_result(_whole(request, timeout_s, answer_bytes_max, ends_s))
        except BaseException as error:  # raised where the body is waited for
            body.set_exception(error)

    # On a thread, as a socket's bound begins anew with every byte that comes.
    threading.Thread(target=read, name="HTTP call", daemon=True).start()
    try:
        return body.result(timeout_s)
    except TimeoutError:
        raise TimeoutError(f"no whole answer within {timeout_s:g} s") from None


def _whole(request: Request, timeout_s: float, num_bytes_max: int, ends_s: float) -> bytes:
    """An answer's body; that of an error is read too, into the `HTTPError`."""
    try:
        with open_call(request, timeout_s) as answer:
            return _read(answer, num_bytes_max, ends_s)
    except HTTPError as error:
        said = io.BytesIO(_read(error, num_bytes_max, ends_s))
        raise HTTPError(error.url, error.code, error.reason, error.headers, said) from None


def _read(answer: Any, num_left: int, ends_s: float) -> bytes:
    """Of an answer so much; nobody waits for what comes later, byte by byte."""
    found = bytearray()
    while num_left > len(found) and (some := answer.read1(num_left - len(found))):
        found += some
        if time.monotonic() > ends_s:
            raise TimeoutError
    return bytes(found)
