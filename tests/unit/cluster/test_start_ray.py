"""A Ray of this machine that does not start."""

from pathlib import Path

import pytest
import ray

from disagg.cluster.ray_cluster import start_ray
from disagg.config import Settings
from disagg.errors import ConfigError


def test_a_start_that_takes_too_long_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ConfigError, match=f"timed out during startup.*logs in {tmp_path}"):
        start_ray(Settings(), tmp_path)
