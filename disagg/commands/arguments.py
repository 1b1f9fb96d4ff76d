"""Options that several commands share, and the settings they make together."""

import os
from pathlib import Path
from typing import Annotated

import typer

from disagg.config import Effective, read_settings
from disagg.config.sources import Given, parse_text
from disagg.errors import ConfigError

Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML file of settings (or DISAGG_CONFIG).")
]
Model = Annotated[str | None, typer.Option("--model", "-m", help="Checkpoint directory.")]
Name = Annotated[str | None, typer.Option("--name", help="Name clients use.")]
Host = Annotated[str | None, typer.Option("--host", help="Address the router binds to.")]
HttpPort = Annotated[int | None, typer.Option("--http-port", help="0: any free one.")]
GrpcPort = Annotated[int | None, typer.Option("--grpc-port", help="0: any free one.")]
Prefill = Annotated[int | None, typer.Option("--prefill", help="Number of prefill workers.")]
Decode = Annotated[int | None, typer.Option("--decode", help="Number of decode workers.")]
RayAddress = Annotated[
    str | None, typer.Option("--ray-address", help='Ray cluster to join, e.g. "auto".')
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any setting.")
]

SETTING_OF = {
    "model": "model.dir",
    "name": "model.name",
    "host": "router.host",
    "http_port": "router.http_port",
    "grpc_port": "router.grpc_port",
    "prefill": "cluster.num_prefill",
    "decode": "cluster.num_decode",
    "both": "cluster.num_both",
    "ray_address": "cluster.ray_address",
    "slo_ttft_ms": "router.slo_ttft_ms",
    "slo_tpot_ms": "router.slo_tpot_ms",
}
"""The setting of each option above that has one, by the option's parameter."""


def read_effective(
    config: Path | None, given: list[str] | None, **options: str | float | None
) -> Effective:
    """Merge file, variables and flags into the settings of this run.

    Args:
        config: the file named by ``--config``, if any.
        given: texts of ``--set``.
        options: values by the names in `SETTING_OF`; None was not given.

    Raises:
        ConfigError: a key or value cannot be used; ``param`` names it.
    """
    values = {
        SETTING_OF[name]: Given(value, f"flag:--{name.replace('_', '-')}")
        for name, value in options.items()
        if value is not None
    }
    for text in given or ():
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals:
            raise ConfigError(f"--set {text}: expected SECTION.KEY=VALUE", param="--set")
        values[key] = Given(parse_text(key, value), f"flag:--set {key}")
    return read_settings(config, os.environ, values)
