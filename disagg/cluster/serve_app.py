"""The workers as an application of Ray Serve, as KubeRay's RayService deploys it.

No request goes through it. Serve says of it whether the fleet is complete: by that KubeRay knows
when a new cluster can take the place of the old one. It needs disagg's extra ``kuberay``.
"""

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus

from disagg.cluster.keep_fleet import FleetKeeper, end_timeout_s
from disagg.config import Settings, read_settings
from disagg.config.sources import Given, parse_text
from disagg.errors import ConfigError, ExpiredError

_POLL_S = 0.5
_ARGUMENTS = frozenset({"config", "set"})
_HEAD = {"node:__internal_head__": 0.001}
"""Ray gives it to the head alone: there the secrets are, and Ray's end is the supervisor's."""

log = logging.getLogger(__name__)


def fleet(args: Mapping[str, Any]) -> serve.Application:
    """Build the application; what ``import_path`` in Serve's configuration names.

    Args:
        args: ``config``, the path of the settings' file; ``set``, single settings over those in
            it, by their dotted keys. ``DISAGG_…`` variables of Ray's head count as always.

    Raises:
        ConfigError: an argument or a setting cannot be used.
    """
    settings = _read(args)
    options: Any = serve.deployment(
        name="workers",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0, "resources": _HEAD},
        graceful_shutdown_timeout_s=end_timeout_s(settings),
    )
    application: serve.Application = options(Workers).bind(dict(args))
    return application


class Workers:
    """One replica: the supervisor beside it, which finds the workers that run already.

    It is healthy when all workers serve, and as long as those that do not may yet. Where the
    application is deleted, the workers drain and end; where the replica alone ends, or another one
    takes its place, they stay.

    Args:
        args: those of `fleet`.

    Raises:
        ConfigError: settings or checkpoint cannot be used.
    """

    _keeper: FleetKeeper | None = None
    _has_been_complete = False

    def __init__(self, args: Mapping[str, Any]) -> None:
        settings = _read(args)
        address = ray.get_runtime_context().gcs_address
        cluster = settings.cluster.model_copy(update={"ray_address": address})
        self._keeper = FleetKeeper(settings.model_copy(update={"cluster": cluster}))
        self._keeper.start()

    async def check_health(self) -> None:
        """Serve asks; the first answer, on which Serve waits, is given when all workers serve.

        Raises:
            ExpiredError: who does not serve, and why; or this replica ends.
        """
        while True:
            if self._keeper is None:
                raise ExpiredError("this replica ends")
            self._keeper.check()
            if self._has_been_complete or self._keeper.is_complete:
                self._has_been_complete = True
                return
            await asyncio.sleep(_POLL_S)

    def __del__(self) -> None:
        """Serve calls it at the replica's end, and waits for it."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.stop(drain=_is_deleted())


def _is_deleted() -> bool:
    """Whether it is the application that ends; in doubt the workers stay."""
    try:
        name = serve.get_replica_context().app_name
        found = serve.status().applications.get(name)
    except Exception:  # Serve's own errors have no common base; the controller may have gone
        log.exception("Serve does not say whether its application is deleted, the workers stay")
        return False
    return found is None or found.status == ApplicationStatus.DELETING


def _read(args: Mapping[str, Any]) -> Settings:
    if unknown := sorted(args.keys() - _ARGUMENTS):
        raise ConfigError(f"{unknown[0]}: no such argument of the application", param=unknown[0])
    if not args.get("config"):
        raise ConfigError("config: which file has the settings?", param="config")
    given = {
        key: Given(parse_text(key, value) if isinstance(value, str) else value, f"args:set {key}")
        for key, value in args.get("set", {}).items()
    }
    return read_settings(Path(args["config"]), os.environ, given).settings
