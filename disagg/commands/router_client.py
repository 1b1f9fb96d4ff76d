"""Calls of commands to a router's admin port; options: where it is, how long to wait for it."""

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from disagg.cluster.http_calls import call, key_header
from disagg.config.sources import KEY_VARIABLE
from disagg.errors import ConfigError, RemoteFault, RequestError

Url = Annotated[str, typer.Option("--url", help="HTTP address of a router's admin port.")]
DEFAULT_URL = "http://127.0.0.1:8001"
Timeout = Annotated[
    float, typer.Option("--timeout", min=0.1, max=60, help="Seconds to wait for the answer.")
]
TIMEOUT_S = 5.0
ANSWER_BYTES_MAX = 64 << 20
UNSURE = "; it may do what was asked all the same, once it goes on"
NO_RECORD = "request_not_found"
"""The code of a router's error about an id without a record: 404 alone says any server."""


def call_router(
    router_url: str,
    path: str,
    timeout_s: float,
    *,
    scope: str,
    put: Any = None,
    record: bool = False,
) -> dict[str, Any]:
    """Get JSON from a router, or put some there; with DISAGG_API_KEY, where there is one.

    Args:
        router_url: of the admin port.
        path: of the page.
        timeout_s: until it has answered.
        scope: what the key must be good for, as an error says it.
        put: the body of a PUT; None: a GET.
        record: a request's is asked for, which the router may not know.

    Raises:
        ConfigError: the URL is no http URL, or DISAGG_API_KEY no key.
        RequestError: the router refuses what was put, or does not know what is asked for, and says
            so.
        RemoteFault: no router answers there in time, or something else does.
    """
    if not router_url.startswith(("http://", "https://")):
        raise ConfigError(f"{router_url!r} is no http:// URL", param="--url")
    url = router_url.rstrip("/") + path
    headers = own_key()
    body = None
    if put is not None:
        body = json.dumps(put).encode()
        headers["Content-Type"] = "application/json"
    method = "GET" if put is None else "PUT"
    try:
        asked = urllib.request.Request(url, body, headers, method=method)
        told = json.loads(call(asked, timeout_s, ANSWER_BYTES_MAX))
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            why = f"{url} answered {error.code}: {KEY_VARIABLE} needs a key that may {scope}"
            raise RemoteFault(why) from error
        if error.code == 400 and put is not None:
            raise RequestError(f"{router_url}: {told_of(error)[0]}") from error
        if error.code == 404:
            said, code = told_of(error)
            if record and code == NO_RECORD:
                raise RequestError(f"{router_url}: {said}") from error
            why = (
                f"{url} answered 404: this is not the admin port of a router that has this page "
                "(router.admin_port, 8001 unless it is set)"
            )
            raise RemoteFault(why) from error
        raise RemoteFault(f"{url} answered {error.code} {error.reason}: not a router?") from error
    except http.client.HTTPException as error:
        why = f"{url} does not speak HTTP ({error!r}): the admin port is router.admin_port"
        raise RemoteFault(why) from error
    except OSError as error:  # URLError and time-outs among them
        reason = getattr(error, "reason", error)
        was_sent = put is not None and isinstance(reason, TimeoutError | ConnectionError)
        unsure = UNSURE if was_sent and not isinstance(reason, ConnectionRefusedError) else ""
        raise RemoteFault(f"no router answers at {url}: {reason}{unsure}") from error
    except (ValueError, RecursionError) as error:
        raise RemoteFault(f"{url} did not answer as a router does: {error!r}") from error
    if not isinstance(told, dict):
        raise RemoteFault(f"{url} did not answer as a router does: no object")
    return told


def own_key() -> dict[str, str]:
    """The header that shows DISAGG_API_KEY, where there is one.

    Raises:
        ConfigError: no key looks so.
    """
    return key_header(os.environ.get(KEY_VARIABLE, ""), KEY_VARIABLE)


@contextmanager
def as_router(url: str) -> Iterator[None]:
    """Read an answer within this: what no router says is an error that names who answered.

    Raises:
        RemoteFault: a field is missing, or is something else.
    """
    try:
        yield
    except (
        LookupError,
        TypeError,
        ArithmeticError,
        ValueError,
        AttributeError,
        RecursionError,
    ) as error:
        raise RemoteFault(f"{url} did not answer as a router does: {error!r}") from error


def told_of(error: urllib.error.HTTPError) -> tuple[str, str]:
    """What the router says of a request that it refuses, and the error's code."""
    try:
        told = json.loads(error.read(ANSWER_BYTES_MAX))["error"]
        return str(told["message"]), str(told["code"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return f"refused ({error.reason})", ""
