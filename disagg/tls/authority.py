"""A cluster's own certificate authority, and what it issues."""

import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from disagg.errors import ConfigError
from disagg.tls.certificate_files import (
    CA_FILE,
    CERTIFICATE_FILE,
    CLIENT_NAME,
    KEY_FILE,
    NODE_NAME,
)
from disagg.tls.given_file import read_given, write_given

CA_KEY_FILE = "ca.key"
NODE, CLIENT = "node", "client"
"""Folders of what is issued."""
CA_DAYS = 3650
CLOCKS_APART = timedelta(hours=1)
"""Certificates begin earlier by so much, for hosts whose clocks are behind."""


_RUN_BEGINS = datetime(1970, 1, 2, tzinfo=UTC)
_RUN_DAYS = 2_900_000
"""From the first day that clocks have into the year 9909."""


class Issued(NamedTuple):
    """A certificate and its key, in PEM."""

    certificate: bytes
    key: bytes


class Authority:
    """Issues certificates of one cluster."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def make(cls, now: datetime, days: int = CA_DAYS) -> Self:
        """A new authority, valid for ``days`` from ``now`` on."""
        key = ec.generate_private_key(ec.SECP256R1())
        # Two clusters' authorities must not look alike.
        name = _name(f"disagg cluster {secrets.token_hex(4)}")
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        certificate = (
            _builder(name, key, now, days)
            .issuer_name(name)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate, key)

    @classmethod
    def load(cls, directory: Path) -> Self:
        """The authority in ``ca.crt`` and ``ca.key``.

        Raises:
            ConfigError: they are no authority's certificate and key.
        """
        try:
            certificate = x509.load_pem_x509_certificate(read_given(directory / CA_FILE)[0])
            key_pem, _ = read_given(directory / CA_KEY_FILE)
            key = serialization.load_pem_private_key(key_pem, password=None)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{directory} has no usable {CA_FILE} and {CA_KEY_FILE}: {error}",
                param="--directory",
            ) from error
        if (
            not isinstance(key, ec.EllipticCurvePrivateKey)
            or certificate.public_key() != key.public_key()
        ):
            raise ConfigError(
                f"{directory / CA_KEY_FILE} is not the key of {directory / CA_FILE}",
                param="--directory",
            )
        return cls(certificate, key)

    @property
    def certificate(self) -> bytes:
        """The authority's own certificate."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key(self) -> bytes:
        """The authority's key: who has it can issue anything."""
        return _key_pem(self._key)

    @property
    def not_after(self) -> datetime:
        """Until when it is valid."""
        return self._certificate.not_valid_after_utc

    def issue(self, name: str, now: datetime, days: int) -> Issued:
        """A certificate for `NODE_NAME`, or `CLIENT_NAME`, which cannot be a server's."""
        key = ec.generate_private_key(ec.SECP256R1())
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if name == NODE_NAME:
            uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
        issuer = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        certificate = (
            _builder(_name(name), key, now, days)
            .issuer_name(self._certificate.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        return Issued(certificate.public_bytes(serialization.Encoding.PEM), _key_pem(key))


def create_certificates(directory: Path, days: int, now: datetime) -> list[Path]:
    """Issue certificates for nodes and for clients; the authority is made if there is none.

    Files are replaced whole, so processes that use them may run.

    Returns:
        The folders that were written, for nodes and for clients.

    Raises:
        ConfigError: half an authority is there, or it expires before the certificates would.
        OSError: the directory cannot be written.
    """
    _make_private(directory)
    has = [(directory / name).exists() for name in (CA_FILE, CA_KEY_FILE)]
    if any(has):
        authority = Authority.load(directory)  # half of one is refused there
    else:
        authority = Authority.make(now)
        write_given(directory / CA_KEY_FILE, authority.key)
        write_given(directory / CA_FILE, authority.certificate, mode=0o644)
    if authority.not_after < now + timedelta(days=days):
        raise ConfigError(
            f"{directory / CA_FILE} expires on {authority.not_after:%Y-%m-%d}, before certificates "
            f"of {days} days: fewer --days, or another --directory for a new authority",
            param="--days",
        )
    return _issue_all(authority, directory, days, now)


def create_for_one_run(directory: Path) -> Path:
    """Certificates of an authority whose key nobody keeps; returns the folder for nodes.

    They end with the run and not at a time: a clock that is set while it goes on, back or from
    years behind, would keep every worker out that is started again.
    """
    _make_private(directory)
    authority = Authority.make(_RUN_BEGINS, _RUN_DAYS)
    return _issue_all(authority, directory, _RUN_DAYS, _RUN_BEGINS)[0]


def remove_keys(directory: Path) -> None:
    """Remove the keys that were issued there, if any: nobody can connect with the rest."""
    for folder in (NODE, CLIENT):
        (directory / folder / KEY_FILE).unlink(missing_ok=True)


def _issue_all(authority: Authority, directory: Path, days: int, now: datetime) -> list[Path]:
    folders = []
    for folder, name in ((NODE, NODE_NAME), (CLIENT, CLIENT_NAME)):
        path = directory / folder
        _make_private(path)
        issued = authority.issue(name, now, days)
        write_given(path / CA_FILE, authority.certificate)
        write_given(path / CERTIFICATE_FILE, issued.certificate)
        write_given(path / KEY_FILE, issued.key)
        folders.append(path)
    return folders


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_APART)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
