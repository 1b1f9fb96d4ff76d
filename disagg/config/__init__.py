"""Settings: one typed tree over a YAML file, environment variables and flags."""

from disagg.config.options import (
    local_router_address,
    reachable_host,
    router_options,
    worker_options,
)
from disagg.config.settings import Settings
from disagg.config.sources import CONFIG_VARIABLE, Effective, read_settings

__all__ = [
    "CONFIG_VARIABLE",
    "Effective",
    "Settings",
    "local_router_address",
    "reachable_host",
    "read_settings",
    "router_options",
    "worker_options",
]
