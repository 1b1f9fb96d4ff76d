"""From settings to the plain options that workers and router take."""

import os
from pathlib import Path

from disagg.config.settings import Settings
from disagg.errors import ConfigError
from disagg.kv.hashing import check_secret
from disagg.router.options import RouterOptions
from disagg.tls.given_file import read_given
from disagg.workers.options import WorkerOptions

_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def model_name(settings: Settings) -> str:
    """The name clients use.

    Raises:
        ConfigError: ``model.dir`` is missing or holds no checkpoint.
    """
    if not settings.model.dir:
        raise ConfigError("model.dir: which checkpoint? (--model DIR)", param="model.dir")
    folder = Path(settings.model.dir)
    config = folder / "config.json"
    if not os.path.isfile(config):  # nor is what can be no path at all
        has = "its config.json is no file" if os.path.lexists(config) else "it has no config.json"
        said = f"is not a checkpoint directory ({has})"
        if os.path.isfile(folder / "adapter_config.json"):
            said = (
                "holds a PEFT adapter without its model, and none is applied here: merge it into"
                " the model's weights (PEFT's merge_and_unload), and save that with save_pretrained"
            )
        elif os.path.isfile(folder / "params.json"):
            said = (
                "holds a checkpoint in Mistral's own format alone (params.json, no config.json):"
                " take the files of its other format, which config.json and model*.safetensors are"
            )
        raise ConfigError(f"model.dir: {folder} {said}", param="model.dir")
    return settings.model.name or folder.resolve().name


def local_router_address(settings: Settings) -> str:
    """host:port of the router's gRPC service as this machine reaches it.

    Raises:
        ConfigError: the port is still open (0), so nobody could find it.
    """
    if not settings.router.grpc_port:
        raise ConfigError(
            "router.grpc_port: must be given where workers and router start apart",
            param="router.grpc_port",
        )
    return f"{reachable_host(settings.router.host)}:{settings.router.grpc_port}"


def reachable_host(host: str) -> str:
    """The address by which this machine reaches what is bound to ``host``."""
    return _ANY_HOST.get(host, host)


def hash_key(settings: Settings) -> str:
    """The cluster's secret that keys the names of KV blocks.

    Raises:
        ConfigError: there is none, or its file cannot be read; it is in no message.
    """
    path, secret = settings.cluster.hash_key_file, settings.cluster.hash_key
    if path:
        try:
            secret = read_given(path)[0].decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not text"
            raise ConfigError(
                f"cluster.hash_key_file: {path}: {reason}", param="cluster.hash_key_file"
            ) from None
    elif not secret:
        raise ConfigError(
            "cluster.hash_key_file: which secret names KV blocks? The same for all routers and "
            "workers (disagg keys create-hash-key FILE)",
            param="cluster.hash_key_file",
        )
    check_secret(secret)
    return secret


def router_options(settings: Settings) -> RouterOptions:
    """Options of the router.

    Raises:
        ConfigError: no usable checkpoint directory, or no secret of the cluster.
    """
    name = model_name(settings)
    cluster = settings.cluster
    counts = {"prefill": cluster.num_prefill, "decode": cluster.num_decode}
    return RouterOptions(
        model_dir=str(Path(settings.model.dir).resolve()),
        model_name=name,
        hash_key=hash_key(settings),
        chat_template=settings.model.chat_template,
        tool_call_parser=settings.model.tool_call_parser,
        reasoning_parser=settings.model.reasoning_parser,
        tls_directory=settings.cluster.tls_directory,
        allow_insecure=settings.cluster.allow_insecure,
        # Workers without a preferred role are there to do both.
        roles_wanted=tuple(role for role, num in counts.items() if num or cluster.num_both),
        **settings.router.model_dump(exclude={"processes"}),
        **settings.limits.model_dump(),
        **settings.telemetry.model_dump(),
    )


def worker_options(settings: Settings, worker_id: str, role: str) -> WorkerOptions:
    """Options of one worker.

    ``host`` may still be "node": only the process that runs on that node can resolve it.

    Raises:
        ConfigError: no usable checkpoint directory, no router to register with, or no secret of
            the cluster.
    """
    name = model_name(settings)
    return WorkerOptions(
        worker_id=worker_id,
        role=role,
        model_dir=str(Path(settings.model.dir).resolve()),
        model_name=name,
        revision=settings.model.revision,
        hash_key=hash_key(settings),
        router_addresses=settings.cluster.router_addresses or (local_router_address(settings),),
        heartbeat_ms=settings.cluster.heartbeat_ms,
        tls_directory=settings.cluster.tls_directory,
        allow_insecure=settings.cluster.allow_insecure,
        discovery_ms=settings.cluster.discovery_ms,
        **settings.worker.model_dump(),
        **settings.cache.model_dump(),
        **settings.scheduling.model_dump(),
        **settings.transfer.model_dump(),
        **settings.telemetry.model_dump(exclude={"log_requests"}),
    )
