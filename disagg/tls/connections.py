"""gRPC ports and channels of one process: with certificates, or plain where that is allowed."""

import asyncio
import logging
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import grpc

from disagg.errors import ConfigError
from disagg.tls.callers import CallerCheck
from disagg.tls.certificate_files import (
    CLIENT_NAME,
    NODE_NAME,
    Certificate,
    CertificateFiles,
    expiry_warning,
)
from disagg.tls.given_file import expanded
from disagg.tls.handlers import Interceptor
from disagg.tls.malformed_requests import MalformedRequests

log = logging.getLogger(__name__)

Options = Sequence[tuple[str, Any]]
WATCH_S = 3600.0
CONNECTIONS_MAX = 1 << 14
HANDSHAKE_MS = 20_000
"""gRPC waits six times as long for who connects and proves nothing."""


class Connections:
    """How this process reaches the others of its cluster, and how they reach it.

    With a directory of certificates both ends of every connection prove that the cluster's
    authority knows them, and everything is encrypted. New connections take the files as they are
    then; those that exist go on.

    Args:
        tls_directory: where this process' certificate lies; "": none, all is plain and open.

    Raises:
        ConfigError: the certificate cannot be used.
    """

    def __init__(self, tls_directory: str) -> None:
        self._files = _files(tls_directory) if tls_directory else None

    @property
    def certificate(self) -> Certificate | None:
        """The certificate of new connections; None: there is none."""
        return None if self._files is None else self._files.current()

    def expires_s(self) -> float:
        """When the certificate of new connections expires, in Unix time; endless without one."""
        certificate = self.certificate
        return math.inf if certificate is None else certificate.not_after.timestamp()

    def channel(self, address: str, options: Options = ()) -> grpc.aio.Channel:
        """A channel to a node; it must show a certificate for `NODE_NAME` or nothing is said."""
        certificate = self.certificate
        if certificate is None:
            return grpc.aio.insecure_channel(address, options=[*options, *NO_PROXY])
        return grpc.aio.secure_channel(
            address, _credentials(certificate), options=[*options, *NO_PROXY, *SERVER_NAME]
        )

    def server(
        self,
        options: Options = (),
        connections_max: int = CONNECTIONS_MAX,
        interceptors: Sequence[Interceptor] = (),
    ) -> grpc.aio.Server:
        """A server to which `listen` adds ports.

        Args:
            options: gRPC's.
            connections_max: at a time; more are closed at once. Each is an open file, also of
                those who have no certificate and only say nothing.
            interceptors: of calls, behind the check of certificates.
        """
        bounds = (
            ("grpc.max_allowed_incoming_connections", connections_max),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        )
        checks = () if self._files is None else (CallerCheck(),)
        # Who is no caller of a method is not told how it reads what he sends.
        return grpc.aio.server(
            options=(*options, *bounds), interceptors=(*checks, *interceptors, MalformedRequests())
        )

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Add a port, which takes callers with a certificate of the cluster alone.

        Returns:
            The port.

        Raises:
            RuntimeError: gRPC cannot bind the address.
        """
        if self._files is None:
            return server.add_insecure_port(address)
        offered = _Offered(self._files)
        credentials = grpc.dynamic_ssl_server_credentials(
            _server_side(offered.certificate), offered.changed, require_client_authentication=True
        )
        return server.add_secure_port(address, credentials)

    async def watch_expiry(self) -> None:
        """Warn, every hour, while the certificate expires soon; never returns."""
        while True:
            if self._files is not None:
                certificate = self._files.current()
                if warning := expiry_warning(certificate, datetime.now(UTC)):
                    log.warning("the certificate in %s %s", self._files.directory, warning)
            await asyncio.sleep(WATCH_S)


class _Offered:
    """The certificate that a port shows; gRPC asks at every handshake whether there is another."""

    def __init__(self, files: CertificateFiles) -> None:
        self.certificate = files.current()
        self._files = files

    def changed(self) -> Any:
        """What to show from now on; None: what was shown before.

        Where gRPC 1.85 was given it anew at every handshake the process died of some hundred
        connections at once: what one thread replaced another seems to have used.
        """
        certificate = self._files.current()
        if certificate is self.certificate:
            return None
        self.certificate = certificate
        return _server_side(certificate)


def client_channel(address: str, tls_directory: str) -> grpc.Channel:
    """A blocking channel to a node, with a node's or a client's certificate, or plain with "".

    Raises:
        ConfigError: the certificate cannot be used.
    """
    if not tls_directory:
        return grpc.insecure_channel(address, options=NO_PROXY)
    certificate = _files(tls_directory, NODE_NAME, CLIENT_NAME).current()
    return grpc.secure_channel(
        address, _credentials(certificate), options=[*NO_PROXY, *SERVER_NAME]
    )


NO_PROXY: Options = (("grpc.enable_http_proxy", 0),)
"""gRPC would ask the proxy that http_proxy names for every address, this machine's own too: no
worker would ever reach a router, or what they say would pass through it."""
SERVER_NAME: Options = (("grpc.ssl_target_name_override", NODE_NAME),)


def _files(tls_directory: str, *names: str) -> CertificateFiles:
    key = "cluster.tls_directory"
    try:
        directory = expanded(tls_directory)
    except OSError as error:
        raise ConfigError(f"{key}: {tls_directory}: {error.strerror}", param=key) from None
    return CertificateFiles(directory, names or (NODE_NAME,))


def _credentials(certificate: Certificate) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(certificate.ca, certificate.key, certificate.chain)


def _server_side(certificate: Certificate) -> Any:
    return grpc.ssl_server_certificate_configuration(
        [(certificate.key, certificate.chain)], root_certificates=certificate.ca
    )
