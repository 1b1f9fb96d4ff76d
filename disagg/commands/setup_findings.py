"""The settings and what they name: ports, certificate, secrets, checkpoint, Ray; for the doctor."""

import os
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from disagg.commands.finding import Finding, fault, note, ok, warning
from disagg.config import Settings
from disagg.config.options import reachable_host
from disagg.errors import ConfigError
from disagg.kv.hashing import check_secret
from disagg.kv.shapes.model_shapes import read_shape
from disagg.router.keys import parse_keys
from disagg.tls.certificate_files import (
    KEY_FILE,
    NODE_NAME,
    expiry_warning,
    read_certificate,
)
from disagg.tls.given_file import read_given
from disagg.workers.engines.checkpoint_files import ADAPTER, read_json, read_weights, why_pickled

CONNECT_S = 3.0
PORT_SETTINGS = (
    ("router.http_port", "host"),
    ("router.admin_port", "admin_host"),
    ("router.grpc_port", "host"),
)


def look_at_setup(settings: Settings) -> Iterator[Finding]:
    """Everything that the settings name."""
    for setting, host_name in PORT_SETTINGS:
        name = setting.partition(".")[2]
        host = getattr(settings.router, host_name)
        yield look_at_port(setting, host, getattr(settings.router, name))
    yield look_at_certificate(settings.cluster.tls_directory)
    yield from look_at_secrets(settings)
    yield from look_at_checkpoint(settings.model.dir)
    yield from look_at_ray(settings.cluster.ray_address)


def look_at_port(setting: str, host: str, port: int) -> Finding:
    """Whether a router could listen there; one that does already is no fault."""
    if not port:
        return note(setting, "0: any free port")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, port))
        except OSError as error:
            seen = f"{host}:{port}: {error.strerror}"
            if _is_taken(host, port):
                advice = "right where a router runs already; else set another, or end what has it"
                return warning(setting, f"{seen}; something listens there", advice)
            return fault(setting, seen, f"set {setting}, or the address beside it, to one of ours")
    return ok(setting, f"{host}:{port} is free")


def _is_taken(host: str, port: int) -> bool:
    try:
        socket.create_connection((reachable_host(host), port), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


def look_at_certificate(directory: str) -> Finding:
    """This node's certificate: whether it can be used, for how long, and who else can read its key.

    A group may read what is root's, as Kubernetes mounts secrets (and PostgreSQL has it).
    """
    if not directory:
        return note("certificate", "none: workers and router have to be on this machine")
    now = datetime.now(UTC)
    key = Path(directory).expanduser() / KEY_FILE
    try:
        certificate = read_certificate(key.parent, (NODE_NAME,), now)
    except ConfigError as error:
        advice = "disagg certificates create, then copy its folder node/ here (docs/security.md)"
        return fault("certificate", error.message, advice)
    seen = f"{directory}: valid until {certificate.not_after:%Y-%m-%d}"
    if soon := expiry_warning(certificate, now):
        advice = "renew it: the same disagg certificates create, and copy; nothing is restarted"
        return warning("certificate", f"{directory} {soon}", advice)
    status = key.stat()
    if status.st_mode & 0o070 and status.st_uid:
        return warning("certificate", f"the group of {key} can read it", f"chmod 600 {key}")
    return ok("certificate", seen)


def look_at_secrets(settings: Settings) -> Iterator[Finding]:
    """The files of secrets that are named; hosts that run workers alone need none of them."""
    hash_key, keys = settings.cluster.hash_key_file, settings.router.api_keys_file
    for setting, path, read, made_by in (
        ("cluster.hash_key_file", hash_key, _check_hash_key, "create-hash-key"),
        ("router.api_keys_file", keys, parse_keys, "create"),
    ):
        if not path:
            continue
        try:
            read(read_given(path)[0])
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "not text"
            advice = f"right on a host of workers alone; else disagg keys {made_by}, or copy it"
            yield warning(setting, f"{path}: {why}", advice)
        except ConfigError as error:
            yield fault(setting, f"{path}: {error.message}", f"disagg keys {made_by} makes one")
        else:
            yield ok(setting, f"{path} can be used")


def _check_hash_key(data: bytes) -> None:
    check_secret(data.decode().strip())


def look_at_checkpoint(directory: str) -> Iterator[Finding]:
    """Whether the files are there, whole, and of a model whose KV cache is known."""
    if not directory:
        yield note("checkpoint", "none given (--model DIR)")
        return
    folder = Path(directory)
    is_adapter = (folder / ADAPTER).exists()
    if is_adapter:
        advice = "merge it into the model's weights (PEFT's merge_and_unload), or take it out"
        yield fault("checkpoint", f"{folder} holds a PEFT adapter: none is applied", advice)
    if not os.path.lexists(folder / "config.json"):
        yield fault("checkpoint", f"{folder} has no config.json", "give a checkpoint's directory")
        return
    weights = sorted(folder.glob("*.safetensors"))
    empty = [path.name for path in weights if not (path.is_file() and path.stat().st_size)]
    usable = bool(weights) and not empty and not is_adapter
    if said := why_pickled(folder):
        seen, _, advice = said.partition(". ")
        yield fault("checkpoint", seen, advice)
    elif not weights or empty:
        seen = f"empty or no file: {', '.join(empty)}" if empty else "no *.safetensors"
        yield fault("checkpoint", f"{folder}: {seen}", "copy the checkpoint again, links resolved")
    if not (folder / "tokenizer.json").is_file():
        advice = "copy tokenizer.json too: JSON answers and many models need it"
        yield warning("checkpoint", f"{folder} has no tokenizer.json", advice)
    try:
        config = read_json(folder / "config.json")
        if usable:
            read_weights(folder)
    except ConfigError as error:
        yield fault("checkpoint", error.message, "copy the checkpoint again")
        return
    try:
        shape = read_shape(config)
    except ConfigError as error:
        yield fault("checkpoint", error.message, "docs/models.md lists what is supported")
        return
    if usable:
        size_gib = sum(path.stat().st_size for path in weights) / (1 << 30)
        yield ok("checkpoint", f"{folder}: {shape.architecture}, {size_gib:.1f} GiB of weights")


def look_at_ray(address: str) -> Iterator[Finding]:
    """How Ray asks who calls it, and whether the cluster to join is there."""
    if not address:
        yield note("ray", "disagg serve starts its own, with a token of its own")
        return
    mode = os.environ.get("RAY_AUTH_MODE", "disabled")
    if mode != "token":
        advice = "set RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN on every host, also here"
        yield warning("ray auth", f"RAY_AUTH_MODE={mode}: whoever reaches it runs code", advice)
    elif not os.environ.get("RAY_AUTH_TOKEN") and not _token_file().is_file():
        advice = "set RAY_AUTH_TOKEN, or copy the token to ~/.ray/auth_token"
        yield fault("ray auth", "token is asked for and there is none here", advice)
    else:
        yield ok("ray auth", "by token")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        yield note("ray", f"cluster.ray_address is {address}")
        return
    if _is_taken(host, int(port)):
        yield ok("ray", f"something listens at {address}")
    else:
        advice = "start the head (ray start --head), or set cluster.ray_address to where it is"
        yield fault("ray", f"nobody answers at {address}", advice)


def _token_file() -> Path:
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
