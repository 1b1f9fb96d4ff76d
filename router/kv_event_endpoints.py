"""Whose KV events the router follows, as it is written in its settings."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl

from disagg.errors import ConfigError

ENDPOINTS_MAX = 256
_NAME = re.compile(r"[A-Za-z0-9._-]{1,63}")
_ADDRESS = re.compile(r"tcp://[^*?/\s]+:([1-9][0-9]{0,4})|ipc://[^*?]+")
PORT_MAX = 65_535
_OPTIONS = ("replay", "tenant")


@dataclass(frozen=True, slots=True)
class KVEventEndpoint:
    """Where one server publishes its KV events.

    Attributes:
        name: what the router calls the server.
        address: of its publisher.
        replay: address for requests of a replay; "" where there is none.
        tenant: whose prompts it serves, of those that have API keys here; "": nobody's.
    """

    name: str
    address: str
    replay: str = ""
    tenant: str = ""


def parse_endpoints(texts: Sequence[str]) -> tuple[KVEventEndpoint, ...]:
    """Read ``NAME=ADDRESS[?replay=ADDRESS][&tenant=NAME]`` each.

    Raises:
        ConfigError: naming the one that cannot be used.
    """
    if len(texts) > ENDPOINTS_MAX:
        raise _refusal(f"{len(texts)} servers; at most {ENDPOINTS_MAX} are followed")
    found: dict[str, KVEventEndpoint] = {}
    for text in texts:
        name, _, rest = text.partition("=")
        address, _, query = rest.partition("?")
        given = parse_qsl(query, keep_blank_values=True)
        options = dict(given)
        if unknown := [key for key, _ in given if key not in _OPTIONS]:
            raise _refusal(f"{text!r}: {unknown[0]!r} is none of {', '.join(_OPTIONS)}")
        if len(options) < len(given):
            raise _refusal(f"{text!r} says something twice")
        if not _NAME.fullmatch(name):
            raise _refusal(f"{text!r}: begins with no name (NAME=tcp://HOST:PORT)")
        for one in (address, options.get("replay", address)):
            matched = _ADDRESS.fullmatch(one)
            if matched is None or int(matched[1] or 0) > PORT_MAX:
                raise _refusal(f"{text!r}: {one!r} is neither tcp://HOST:PORT nor ipc://PATH")
        if name in found:
            raise _refusal(f"{name!r} is there twice")
        found[name] = KVEventEndpoint(name, address, **options)
    return tuple(found.values())


def _refusal(why: str) -> ConfigError:
    return ConfigError(why, param="router.kv_event_endpoints")
