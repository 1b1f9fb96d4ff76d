"""Who calls: a tenant by one of its keys, and what the key is for."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from disagg.errors import RequestError

SERVE, OBSERVE, ADMIN = "serve", "observe", "admin"
SCOPES = frozenset((SERVE, OBSERVE, ADMIN))
"""Generate; look at metrics and workers; change the workers' state and see every record."""
REALM = b'Bearer realm="disagg"'


class AccessError(RequestError):
    """A caller is refused before anything else is looked at.

    Attributes:
        challenge: value of the header ``WWW-Authenticate``.
    """

    challenge: ClassVar[bytes]


class UnauthenticatedError(AccessError):
    """There is no key in the request, or none that is known here."""

    http_status = 401
    grpc_status = "UNAUTHENTICATED"
    code = "invalid_api_key"
    challenge = REALM


class ForbiddenError(AccessError):
    """The key is known and not for this."""

    http_status = 403
    grpc_status = "PERMISSION_DENIED"
    code = "insufficient_permissions"
    challenge = REALM + b', error="insufficient_scope"'


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request comes from."""

    tenant: str
    """Shares prefixes and records with nobody else; "" where the router has no keys."""
    key_name: str
    """Of the key; where none is known, the network that the request came from, or ""."""
    scopes: frozenset[str]

    def check(self, scopes: frozenset[str]) -> None:
        """Raise ForbiddenError unless the key is for one of ``scopes``."""
        if not self.scopes & scopes:
            wanted = " or ".join(sorted(scopes))
            raise ForbiddenError(f"this API key is not for {wanted}")

    @property
    def holder(self) -> tuple[str, str]:
        """Equal for callers whose requests are counted together: of a tenant, or a network."""
        return (self.tenant, "") if self.tenant else ("", self.key_name)

    def at(self, address: str) -> "Caller":
        """The caller at an address: without a key its network tells it from others."""
        return self if self.tenant else replace(self, key_name=network_of(address))

    def own_id(self, request_id: str) -> str:
        """The request's id within the router; equal ids of two tenants are two requests."""
        return f"{self.tenant}/{request_id}" if self.tenant else request_id

    def sees(self, own_id: str) -> bool:
        """Whether the request is the caller's tenant's, or the caller may see everybody's."""
        mine = not self.tenant or own_id.startswith(f"{self.tenant}/")
        return mine or ADMIN in self.scopes

    def shown_id(self, own_id: str) -> str:
        """The id as the caller knows it: the reverse of `own_id`."""
        return own_id.removeprefix(f"{self.tenant}/") if self.tenant else own_id


ANYBODY = Caller("", "", SCOPES)
"""Everybody, where the router has no keys."""
NOBODY = Caller("", "", frozenset())
"""Who shows no key that is known, on a page that asks for none."""


def presented_key(headers: Mapping[bytes, bytes]) -> str:
    """The key in a request's headers, by lower-case name: a Bearer token or ``x-api-key``.

    Returns:
        "" where there is none.
    """
    scheme, _, token = headers.get(b"authorization", b"").strip().partition(b" ")
    found = token if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
    return found.strip().decode("latin-1")


def network_of(address: str) -> str:
    """An IPv4 address, or the network of an IPv6 address, whose 64 bits one owner has.

    Any other text stays as it is.
    """
    if ":" not in address:
        return address
    packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    if packed[:12] == bytes(10) + b"\xff\xff":  # an IPv4 address, on a port of both
        return socket.inet_ntop(socket.AF_INET, packed[12:])
    return f"{socket.inet_ntop(socket.AF_INET6, packed[:8] + bytes(8))}/64"
