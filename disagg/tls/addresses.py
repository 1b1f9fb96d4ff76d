"""Addresses that only this machine reaches, and ports that a firewall can name."""

import ipaddress
import re

from disagg.errors import ConfigError

_PORTS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


def parse_ports(text: str) -> range:
    """The ports that ``7100`` or ``7100-7119`` stands for; ``0``, any free one, as port 0.

    Raises:
        ConfigError: it is neither, or not below 65536.
    """
    match = _PORTS.fullmatch(text)
    first, last = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
    if not first <= last <= 65535 or (first == 0 and last):
        raise ConfigError(f"{text!r} is no port (7100), range of ports (7100-7119) or 0 (any)")
    return range(first, last + 1)


def check_exposure(key: str, host: str, tls_directory: str, *, allow_insecure: bool) -> None:
    """Refuse a port that others could reach and that would answer anybody.

    Args:
        key: the setting that ``host`` comes from.
        host: the address that will be bound.
        tls_directory: "" where there are no certificates.
        allow_insecure: the operator wants it all the same.

    Raises:
        ConfigError: it is not a loopback address, and nothing protects it.
    """
    if tls_directory or allow_insecure or is_loopback(host):
        return
    raise ConfigError(
        f"{key}: {host} can be reached from other machines, and without certificates anybody there"
        " could register, open sessions and read KV: set cluster.tls_directory (disagg certificates"
        " create makes them, see docs/security.md), or bind 127.0.0.1, or set"
        " cluster.allow_insecure",
        param=key,
    )


def is_loopback(host: str) -> bool:
    """Whether an address, or the name localhost, is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
