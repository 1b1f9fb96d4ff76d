"""Files of a certificate: what is refused, by name; what is read anew; what is said in time."""

import logging
import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from disagg.errors import ConfigError
from disagg.tls import certificate_files
from disagg.tls.authority import CLIENT, CLOCKS_APART, Authority
from disagg.tls.certificate_files import (
    CA_FILE,
    CERTIFICATE_FILE,
    EXPIRY_WARNING,
    KEY_FILE,
    NODE_NAME,
    CertificateFiles,
    expiry_warning,
    read_certificate,
)
from tests.unit.tls.strangers import NOW, create

DAYS = 30


def read(folder: Path, after: timedelta = timedelta(0)) -> None:
    read_certificate(folder, (NODE_NAME,), NOW + after)


def other_key() -> bytes:
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def put(name: str, content: Callable[[Path], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content(folder))


FAULTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no key": (lambda folder: (folder / KEY_FILE).unlink(), KEY_FILE, "does not exist"),
    "no authority": (lambda folder: (folder / CA_FILE).unlink(), CA_FILE, "does not exist"),
    "open key": (lambda folder: (folder / KEY_FILE).chmod(0o644), KEY_FILE, "chmod 600"),
    "no PEM": (put(CERTIFICATE_FILE, lambda _: b"x"), CERTIFICATE_FILE, "not a certificate"),
    "no key in it": (put(KEY_FILE, lambda _: b"x"), KEY_FILE, "not a private key"),
    "another key": (put(KEY_FILE, lambda _: other_key()), KEY_FILE, "not the key of"),
    "another authority": (
        put(CA_FILE, lambda _: Authority.make(NOW).certificate),
        CERTIFICATE_FILE,
        "was not issued by",
    ),
    "a client's": (
        lambda folder: shutil.copytree(folder.parent / CLIENT, folder, dirs_exist_ok=True),
        CERTIFICATE_FILE,
        "is for client",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_names_its_file_and_a_remedy(tmp_path: Path, fault: str) -> None:
    folder = create(tmp_path)
    read(folder)  # control
    spoil, file, text = FAULTS[fault]
    spoil(folder)
    with pytest.raises(ConfigError) as caught:
        read(folder)
    assert caught.value.message.startswith(f"{folder / file} ")
    assert text in caught.value.message
    assert caught.value.message.endswith(")")
    assert caught.value.param == "cluster.tls_directory"


@pytest.mark.parametrize(
    ("days", "text"), [(DAYS, "has expired on"), (-1, "check this machine's clock")]
)
def test_outside_its_time_it_is_refused(tmp_path: Path, days: int, text: str) -> None:
    folder = create(tmp_path, DAYS)
    read(folder, timedelta(days=DAYS) - timedelta(minutes=1))  # control
    with pytest.raises(ConfigError, match=text) as caught:
        read(folder, timedelta(days=days))
    assert str(folder / CERTIFICATE_FILE) in caught.value.message or days < 0


def test_the_end_is_announced(tmp_path: Path) -> None:
    certificate = read_certificate(create(tmp_path, DAYS), (NODE_NAME,), NOW)
    assert expiry_warning(certificate, NOW) == ""
    soon = certificate.not_after - EXPIRY_WARNING
    assert "in 21 days" in expiry_warning(certificate, soon)
    assert "has expired" in expiry_warning(certificate, certificate.not_after)


def test_files_that_were_replaced_are_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = create(tmp_path)
    files = CertificateFiles(folder)
    first = files.current()
    assert files.current() is first
    create(tmp_path)
    second = files.current()
    assert second.chain != first.chain
    assert second.ca == first.ca
    with caplog.at_level(logging.ERROR):
        (folder / KEY_FILE).write_bytes(other_key())
        assert files.current() is second
        assert files.current() is second
    (line,) = caplog.messages  # once, not at every connection
    assert str(folder / KEY_FILE) in line
    create(tmp_path)
    assert files.current().chain != second.chain


def test_a_certificate_that_begins_later_is_taken_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This host's clock is behind the authority's: nothing on disk changes any more."""
    folder = create(tmp_path)
    files = CertificateFiles(folder)
    first = files.current()
    later = datetime.now(UTC) + CLOCKS_APART + timedelta(minutes=5)
    issued = Authority.load(tmp_path).issue(NODE_NAME, later, DAYS)
    (folder / CERTIFICATE_FILE).write_bytes(issued.certificate)
    (folder / KEY_FILE).write_bytes(issued.key)
    assert files.current() is first
    assert files.current() is first
    (line,) = caplog.messages
    assert "check this machine's clock" in line

    monkeypatch.setattr(certificate_files, "datetime", SimpleNamespace(now=lambda _: later))
    second = files.current()
    assert second.chain == issued.certificate
    assert files.current() is second


def test_a_file_that_is_written_in_parts_is_read_whole(tmp_path: Path) -> None:
    """Both parts within one tick of the file system's clock; the first could be used as it is."""
    folder = create(tmp_path)
    both = (folder / CERTIFICATE_FILE).read_bytes() + Authority.make(NOW).certificate
    files = CertificateFiles(folder)
    before = (folder / CERTIFICATE_FILE).stat()
    (folder / CERTIFICATE_FILE).write_bytes(both)
    os.utime(folder / CERTIFICATE_FILE, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert files.current().chain == both


def test_a_key_that_is_taken_away_while_it_is_read_is_no_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = create(tmp_path, DAYS)
    files = CertificateFiles(folder)
    before = files.current()
    real = Path.open

    def opened(path: Path, mode: str = "r") -> object:
        file = real(path, mode)
        path.unlink()
        return file

    os.utime(folder / KEY_FILE, (1, 1))  # to be read anew
    monkeypatch.setattr(Path, "open", opened)
    assert files.current() == before
    monkeypatch.undo()
    assert files.current() == before  # the files are gone, which is told in the log


def test_a_link_to_another_folder_is_a_replacement(tmp_path: Path) -> None:
    """As Kubernetes replaces a secret's files."""
    folders = [create(tmp_path / name) for name in ("old", "new")]
    (tmp_path / "data").symlink_to(folders[0])
    files = CertificateFiles(tmp_path / "data")
    first = files.current()
    (tmp_path / "next").symlink_to(folders[1])
    os.replace(tmp_path / "next", tmp_path / "data")
    assert files.current().ca != first.ca


def test_a_chain_over_an_authority_between_is_followed(tmp_path: Path) -> None:
    folder = create(tmp_path)
    both = (folder / CERTIFICATE_FILE).read_bytes() + Authority.make(NOW).certificate
    (folder / CERTIFICATE_FILE).write_bytes(both)
    read(folder)  # what does not belong to the chain does no harm
    ca = (folder / CA_FILE).read_bytes()
    (folder / CA_FILE).write_bytes(Authority.make(NOW).certificate + ca)
    read(folder)  # one of several authorities
