"""What `disagg certificates create` makes, makes again, and refuses."""

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from typer.testing import CliRunner

from disagg.commands.main import app
from disagg.errors import ConfigError
from disagg.tls.authority import (
    CA_DAYS,
    CA_KEY_FILE,
    CLIENT,
    NODE,
    create_certificates,
    create_for_one_run,
    remove_keys,
)
from disagg.tls.certificate_files import (
    CA_FILE,
    CERTIFICATE_FILE,
    CLIENT_NAME,
    KEY_FILE,
    NODE_NAME,
    read_certificate,
)
from tests.unit.tls.strangers import NOW


def files(directory: Path) -> dict[str, int]:
    """Paths of all files, with the rights of each."""
    return {
        str(path.relative_to(directory)): stat.S_IMODE(path.stat().st_mode)
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_the_command_makes_what_nodes_and_clients_take(tmp_path: Path) -> None:
    directory = tmp_path / "made"
    command = ["certificates", "create", "--directory", str(directory), "--days", "90"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert f"--from-file={directory / NODE}" in done.output
    modes = files(directory)
    names = (CA_FILE, CERTIFICATE_FILE, KEY_FILE)
    private = {f"{folder}/{name}" for folder in (NODE, CLIENT) for name in names}
    assert modes == dict.fromkeys({*private, CA_KEY_FILE}, 0o600) | {CA_FILE: 0o644}
    folders = (directory, directory / NODE, directory / CLIENT)
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
    for folder, name in ((NODE, NODE_NAME), (CLIENT, CLIENT_NAME)):
        certificate = read_certificate(directory / folder, (name,), datetime.now(UTC))
        left = certificate.not_after - datetime.now(UTC)
        assert timedelta(days=89) < left <= timedelta(days=90)
    checked = CliRunner().invoke(app, ["certificates", "check", "--directory", str(folders[1])])
    assert "valid until" in checked.output
    checked = CliRunner().invoke(app, ["certificates", "check", "--directory", str(directory)])
    assert [line.split(":")[0] for line in checked.output.splitlines()] == [*map(str, folders[1:])]
    # A client's certificate is no server's.
    own = x509.load_pem_x509_certificate((directory / CLIENT / CERTIFICATE_FILE).read_bytes())
    usage = own.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]


def test_again_it_renews_under_the_same_authority(tmp_path: Path) -> None:
    folder, _ = create_certificates(tmp_path, 30, NOW)
    before = [(folder / name).read_bytes() for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE)]
    create_certificates(tmp_path, 30, NOW)
    after = [(folder / name).read_bytes() for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE)]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, False]
    read_certificate(folder, (NODE_NAME,), NOW)


@pytest.mark.parametrize("missing", [CA_FILE, CA_KEY_FILE])
def test_half_an_authority_is_not_made_anew(tmp_path: Path, missing: str) -> None:
    create_certificates(tmp_path, 30, NOW)
    (tmp_path / missing).unlink()
    with pytest.raises(ConfigError, match=missing):
        create_certificates(tmp_path, 30, NOW)


def test_nothing_outlives_its_authority(tmp_path: Path) -> None:
    create_certificates(tmp_path, 30, NOW)
    late = NOW + timedelta(days=CA_DAYS - 20)
    create_certificates(tmp_path, 19, late)
    with pytest.raises(ConfigError, match="expires on"):
        create_certificates(tmp_path, 21, late)


def test_of_one_run_no_authority_is_kept_and_no_key_is_left(tmp_path: Path) -> None:
    folder = create_for_one_run(tmp_path / "run")
    assert folder == tmp_path / "run" / NODE
    assert CA_KEY_FILE not in files(tmp_path / "run")
    read_certificate(folder, (NODE_NAME,), datetime.now(UTC))
    remove_keys(tmp_path / "run")
    assert not [name for name in files(tmp_path / "run") if name.endswith(".key")]
    remove_keys(tmp_path / "never made")


@pytest.mark.parametrize(
    "now", [datetime(1970, 1, 3, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)]
)
def test_of_one_run_they_hold_however_the_clock_is_set(tmp_path: Path, now: datetime) -> None:
    folder = create_for_one_run(tmp_path)
    for one, name in ((folder, NODE_NAME), (tmp_path / CLIENT, CLIENT_NAME)):
        certificate = read_certificate(one, (name,), now)
        assert certificate.not_after > now + timedelta(days=CA_DAYS)
