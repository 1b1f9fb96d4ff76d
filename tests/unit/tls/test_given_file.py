"""Files that settings name: what is no file, or has no end, is refused at once and by name."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from disagg.cluster.load_watch import read_key
from disagg.config import Settings, router_options
from disagg.config.settings import ClusterSettings, ModelSettings
from disagg.config.sources import read_file
from disagg.errors import ConfigError
from disagg.tls.authority import CA_KEY_FILE, Authority
from disagg.tls.certificate_files import FILES
from disagg.tls.connections import Connections
from disagg.tls.given_file import FILE_BYTES_MAX, expanded, read_given, write_given
from tests.unit.tls.strangers import create


def test_a_file_comes_whole_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"x" * FILE_BYTES_MAX)
    path.chmod(0o640)
    data, mode = read_given(path)
    assert data == path.read_bytes()
    assert mode & 0o777 == 0o640


def test_of_a_link_the_target_is_replaced(tmp_path: Path) -> None:
    """Routers may read it by its own name: a key that is revoked by another one has to be gone."""
    kept = tmp_path / "kept"
    kept.mkdir()
    (tmp_path / "link").symlink_to("kept/secret")
    write_given(tmp_path / "link", b"first")
    (kept / "secret").chmod(0o640)
    write_given(tmp_path / "link", b"second")
    assert (tmp_path / "link").is_symlink()
    assert read_given(kept / "secret")[0] == b"second"
    assert (kept / "secret").stat().st_mode & 0o777 == 0o640
    assert [one.name for one in kept.iterdir()] == ["secret"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_that_root_replaces_stays_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    write_given(path, b"first")
    os.chown(path, 65534, 65533)
    write_given(path, b"second")
    assert (path.stat().st_uid, path.stat().st_gid) == (65534, 65533)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_a_file_that_its_readers_could_not_read_any_more_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    path = tmp_path / "secret"
    write_given(path, b"first")
    path.chmod(mode)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", refuse)  # as for who is neither its owner nor root
    if mode == 0o600:
        with pytest.raises(OSError, match="could not read it any more"):
            write_given(path, b"second")
    else:  # the group is the same, or everybody may read it
        write_given(path, b"second")
    assert read_given(path)[0] == (b"first" if mode == 0o600 else b"second")
    assert [one.name for one in tmp_path.iterdir()] == ["secret"]


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """Nobody writes into it."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    return tmp_path / "pipe"


def test_what_is_no_file_is_refused_at_once(pipe: Path, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(b"x" * (FILE_BYTES_MAX + 1))
    for path, reason in (
        (pipe, "is no file that can be read again"),
        ("/dev/zero", "is no file that can be read again"),
        (large, f"larger than {FILE_BYTES_MAX} bytes"),
        ("~no-such-user/key", "no home directory is known for it"),
        ("a\0b", "is no path"),
    ):
        with pytest.raises(OSError, match=reason):
            read_given(path)
    assert expanded("~") == Path.home()


@pytest.mark.parametrize("name", [*FILES, CA_KEY_FILE])
def test_a_pipe_is_no_certificate(name: str, tmp_path: Path) -> None:
    folder = create(tmp_path) if name in FILES else create(tmp_path).parent
    (folder / name).unlink()
    os.mkfifo(folder / name, 0o600)
    use: Callable[[], object] = (
        (lambda: Connections(str(folder))) if name in FILES else (lambda: Authority.load(folder))
    )
    with pytest.raises(ConfigError, match="no file that can be read again") as caught:
        use()
    assert name in caught.value.message


@pytest.mark.parametrize("path", ["~no-such-user/x", "pipe", "/dev/zero"])
def test_the_setting_is_named(
    path: str, pipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    cluster = ClusterSettings(hash_key_file=path)
    settings = Settings(model=ModelSettings(dir=str(tmp_path)), cluster=cluster)
    with pytest.raises(ConfigError, match=f"^cluster.hash_key_file: {path}: "):
        router_options(settings)
    with pytest.raises(ConfigError, match=f"^autoscale.api_key_file: {path}: "):
        read_key(path)
    if "~" in path:
        with pytest.raises(ConfigError, match=f"^cluster.tls_directory: {path}: "):
            Connections(path)


def test_settings_have_an_end() -> None:
    with pytest.raises(ConfigError, match=r"^/dev/zero: larger than"):
        read_file(Path("/dev/zero"))
