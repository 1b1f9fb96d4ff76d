"""The three files of a certificate: read, checked, and read again when they change."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from disagg.errors import ConfigError
from disagg.tls.given_file import read_given

log = logging.getLogger(__name__)

CA_FILE = "ca.crt"
CERTIFICATE_FILE = "tls.crt"
KEY_FILE = "tls.key"
"""Named as in Kubernetes' secrets of type tls and those of cert-manager, which then fit as they
are."""
FILES = (CA_FILE, CERTIFICATE_FILE, KEY_FILE)
NODE_NAME = "node.disagg.internal"
"""In the certificates of routers and workers; who connects asks for it, at any address."""
CLIENT_NAME = "client.disagg.internal"
"""In the certificates of gRPC clients, which may generate and look up prefixes, no more."""
EXPIRY_WARNING = timedelta(days=21)
CHAIN_MAX = 8
WHAT_TO_DO = "disagg certificates create makes it; see docs/security.md"


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate with its key, and whom it trusts; all in PEM."""

    ca: bytes
    """Certificates of authorities, one or several."""
    chain: bytes
    """The certificate, then those between it and the authority."""
    key: bytes = field(repr=False)
    not_after: datetime
    """The first of these expires then."""


def read_certificate(directory: Path, names: Sequence[str], now: datetime) -> Certificate:
    """Read a directory of ``ca.crt``, ``tls.crt``, ``tls.key``, and check all of it.

    Args:
        directory: where the files lie.
        names: the certificate must have one of these.
        now: must lie within its validity.

    Raises:
        ConfigError: a file is missing, unreadable, open to everybody, expired, or does not fit
            the others; the message names it and says what to do.
    """
    (ca, _), (chain, _), (key, key_mode) = map(_read, (directory / name for name in FILES))
    key_path, path = directory / KEY_FILE, directory / CERTIFICATE_FILE
    if key_mode & 0o007:
        raise _fault(key_path, "every user of this machine can read it", f"chmod 600 {key_path}")
    try:
        private = serialization.load_pem_private_key(key, password=None)
    except (ValueError, TypeError) as error:
        raise _fault(key_path, "is not a private key in PEM without a password") from error
    authorities = _certificates(directory / CA_FILE, ca)
    own, *between = _certificates(path, chain)
    if own.public_key() != private.public_key():
        raise _fault(key_path, f"is not the key of {path}", "copy both files of one certificate")
    given = _names_of(own)
    if not set(names) & set(given):
        raise _fault(path, f"is for {', '.join(given) or 'nobody'}, not for {' or '.join(names)}")
    used = _chain(own, between, authorities)
    if not used:
        raise _fault(
            path,
            f"was not issued by an authority in {directory / CA_FILE}",
            "copy all three files of one directory that disagg certificates create made",
        )
    for one in used:
        where = directory / CA_FILE if one in authorities else path
        if now >= one.not_valid_after_utc:
            raise _fault(where, f"has expired on {_date(one.not_valid_after_utc)}")
        if now < one.not_valid_before_utc:
            begins = f"{one.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
            raise _fault(where, f"is valid from {begins} on", "check this machine's clock")
    return Certificate(ca, chain, key, min(one.not_valid_after_utc for one in used))


def expiry_warning(certificate: Certificate, now: datetime) -> str:
    """What to say about the days that are left; "" while there are many."""
    left = certificate.not_after - now
    if left > EXPIRY_WARNING:
        return ""
    if left <= timedelta(0):
        return f"has expired on {_date(certificate.not_after)}: nobody can connect any more"
    return f"expires on {_date(certificate.not_after)}, in {left.days} days"


class CertificateFiles:
    """A certificate on disk that may be replaced while it is in use. For any thread.

    Args:
        directory: where the files lie.
        names: the certificate must have one of these.

    Raises:
        ConfigError: as `read_certificate`.
    """

    def __init__(self, directory: Path, names: Sequence[str] = (NODE_NAME,)) -> None:
        self.directory = directory
        self._names = names
        self._lock = threading.Lock()
        self._seen = self._state()
        self._fault = ""
        self._certificate = read_certificate(directory, names, datetime.now(UTC))

    def current(self) -> Certificate:
        """What the files hold now; while they cannot be used, what they held before.

        A certificate that cannot be used yet, as its time begins later, can be without a change.
        """
        with self._lock:
            state = self._state()
            if state != self._seen or self._fault:
                self._seen = state
                try:
                    self._certificate = read_certificate(
                        self.directory, self._names, datetime.now(UTC)
                    )
                    self._fault = ""
                    log.info("certificate of %s was read anew", self.directory)
                except ConfigError as error:
                    if error.message != self._fault:
                        log.error("the certificate from before stays in use: %s", error.message)
                    self._fault = error.message
            return self._certificate

    def _state(self) -> object:
        """Differs when a file was replaced, also by a link to another directory."""
        found: list[object] = []
        for name in FILES:
            try:
                status = (self.directory / name).stat()
            except OSError as error:
                found.append(error.errno)
            else:
                # A file that is written in parts may get all of them in one tick of its clock.
                found.append(
                    (
                        status.st_dev,
                        status.st_ino,
                        status.st_mtime_ns,
                        status.st_size,
                        status.st_mode,
                    )
                )
        return found


def _read(path: Path) -> tuple[bytes, int]:
    try:
        return read_given(path)
    except FileNotFoundError as error:
        raise _fault(path, "does not exist on this host") from error
    except OSError as error:
        raise _fault(path, f"cannot be read: {error.strerror}", "check its owner") from error


def _certificates(path: Path, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise _fault(path, "is not a certificate in PEM") from error


def _names_of(certificate: x509.Certificate) -> list[str]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return found.value.get_values_for_type(x509.DNSName)


def _chain(
    own: x509.Certificate, between: list[x509.Certificate], authorities: list[x509.Certificate]
) -> list[x509.Certificate]:
    """The certificate and its issuers up to an authority; empty where none is reached."""
    used = [own]
    for _ in range(CHAIN_MAX):
        for issuer in (*authorities, *between):
            if issuer not in used and _issued(issuer, used[-1]):
                used.append(issuer)
                break
        else:
            return []
        if used[-1] in authorities:
            return used
    return []


def _issued(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _date(when: datetime) -> str:
    return f"{when:%Y-%m-%d}"


def _fault(path: Path, what: str, remedy: str = WHAT_TO_DO) -> ConfigError:
    return ConfigError(f"{path} {what} ({remedy})", param="cluster.tls_directory")
