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
from disagg.tls.given_file import FILE_BYTES_MAX, expanded, read_given
from tests.unit.tls.strangers import create


def test_a_file_comes_whole_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"x" * FILE_BYTES_MAX)
    path.chmod(0o640)
    data, mode = read_given(path)
    assert data == path.read_bytes()
    assert mode & 0o777 == 0o640


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
