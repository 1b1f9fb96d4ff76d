"""Certificates that are not good enough, and one that is."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc

from disagg.tls.authority import CLIENT, NODE, Authority, create_certificates
from disagg.tls.certificate_files import CA_FILE, CERTIFICATE_FILE, KEY_FILE, NODE_NAME
from disagg.tls.connections import SERVER_NAME

NOW = datetime.now(UTC)


@dataclass(frozen=True)
class Caller:
    """What somebody who dials a port has; nothing at all: no TLS either."""

    trusts: bytes = b""
    key: bytes | None = None
    certificate: bytes | None = None

    def channel(self, address: str) -> grpc.Channel:
        """A blocking channel; it never shares a connection with another one."""
        own = (("grpc.use_local_subchannel_pool", 1),)
        if not self.trusts:
            return grpc.insecure_channel(address, options=own)
        credentials = grpc.ssl_channel_credentials(self.trusts, self.key, self.certificate)
        return grpc.secure_channel(address, credentials, options=(*own, *SERVER_NAME))


def create(directory: Path, days: int = 30) -> Path:
    """An authority with certificates for nodes and clients; returns the nodes' folder."""
    return create_certificates(directory, days, NOW)[0]


def holder_of(folder: Path) -> Caller:
    """Who has the files of that folder."""
    ca, key, own = ((folder / name).read_bytes() for name in (CA_FILE, KEY_FILE, CERTIFICATE_FILE))
    return Caller(ca, key, own)


def strangers(directory: Path) -> dict[str, Caller]:
    """Callers that no port may let in, by what they lack; all trust the cluster's authority.

    Args:
        directory: what `create` was given.
    """
    ca = (directory / CA_FILE).read_bytes()
    expired = Authority.load(directory).issue(NODE_NAME, NOW - timedelta(days=60), 30)
    foreign = Authority.make(NOW).issue(NODE_NAME, NOW, 30)
    return {
        "no TLS": Caller(),
        "no certificate": Caller(ca),
        "another authority's": Caller(ca, foreign.key, foreign.certificate),
        "an expired one": Caller(ca, expired.key, expired.certificate),
    }


def client_of(directory: Path) -> Caller:
    """A client of the cluster, who is no node."""
    return holder_of(directory / CLIENT)


def node_of(directory: Path) -> Caller:
    """A node of the cluster."""
    return holder_of(directory / NODE)
