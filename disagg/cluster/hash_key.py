"""The secret that names KV blocks, where a cluster of one machine makes its own."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from disagg.config import Settings
from disagg.errors import ConfigError
from disagg.tls.given_file import expanded
from disagg.workers.tiers.options import parse_tiers

SECRET_BYTES = 32


def with_hash_key(
    settings: Settings, environ: Mapping[str, str], *, lasting: bool = False
) -> Settings:
    """Settings with a secret of the cluster: what is given, else one made here.

    A new one for each run, unless workers outlive it (``lasting``) or a tier keeps blocks for the
    next: then a file below the user's home, made at the first need, so that they are found again.

    Raises:
        ConfigError: the file cannot be made.
    """
    given = settings.cluster
    if given.hash_key or given.hash_key_file:
        return settings
    lasting = lasting or any(tier.kind != "host" for tier in parse_tiers(settings.worker.tiers))
    if lasting:
        path = own_path(environ)
        if not path.exists():
            try:
                make_hash_key(path)
            except ConfigError:
                if not path.exists():  # or another cluster of this user has just made it
                    raise
        update = {"hash_key_file": str(path)}
    else:
        update = {"hash_key": new_secret()}
    return settings.model_copy(update={"cluster": given.model_copy(update=update)})


def own_path(environ: Mapping[str, str]) -> Path:
    """Where this user's clusters keep their secret.

    Raises:
        ConfigError: nobody knows where the user's home is.
    """
    state = environ.get("XDG_STATE_HOME") or "~/.local/state"
    try:
        return expanded(state) / "disagg" / "hash-key"
    except OSError as error:
        raise ConfigError(
            f"cluster.hash_key_file: {state}: {error.strerror}: set the file, or XDG_STATE_HOME",
            param="cluster.hash_key_file",
        ) from None


def new_secret() -> str:
    """A secret that nobody guesses."""
    return secrets.token_hex(SECRET_BYTES)


def make_hash_key(path: Path) -> None:
    """Write a new secret into a new file that only its owner reads.

    Raises:
        ConfigError: there is such a file already, or it cannot be made.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(file, "w") as sink:
                sink.write(new_secret() + "\n")
        except OSError:
            path.unlink()  # an empty file would be taken for the secret by every later start
            raise
    except OSError as error:
        raise ConfigError(
            f"cluster.hash_key_file: {path}: {error.strerror}", param="cluster.hash_key_file"
        ) from error
