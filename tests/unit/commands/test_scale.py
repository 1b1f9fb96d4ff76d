"""`disagg scale` where there is nothing that it may scale, and what a start that fails leaves."""

from pathlib import Path

import pytest

from disagg.cluster import local, ray_cluster, run_folder
from disagg.cluster.local import LocalCluster
from disagg.commands.scale import scale
from disagg.config import Settings
from disagg.errors import ClusterTokenError, ConfigError, ExpiredError


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ClusterTokenError("in any words"), True),
        (ExpiredError("cluster.ray_address: no Ray cluster at auto: none"), False),
    ],
)
def test_beside_a_serve_of_one_machine_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, error: ExpiredError, says: bool
) -> None:
    """A token was said to be missing that nobody can have."""

    def join(*_: object) -> None:
        raise error

    monkeypatch.setattr(ray_cluster, "join_ray", join)
    with pytest.raises(ExpiredError) as refused:
        scale(prefill=2)
    assert ("start it again with --prefill and --decode" in refused.value.message) is says


@pytest.mark.parametrize("writes_a_log", [False, True])
def test_a_start_that_fails_before_any_log_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, writes_a_log: bool
) -> None:
    def full(settings: Settings, folder: Path, report: object) -> Settings:
        if writes_a_log:
            (folder / "router.log").touch()
        raise ConfigError("No space left on device")

    monkeypatch.setattr(run_folder, "PARENT", tmp_path)
    monkeypatch.setattr(local, "router_options", lambda _: None)
    monkeypatch.setattr(local, "check_files", lambda _: None)
    monkeypatch.setattr(local, "with_certificates", full)
    said: list[str] = []
    with pytest.raises(ConfigError, match="No space left"):
        LocalCluster(Settings(), said.append).start()
    assert len(list(tmp_path.glob("disagg-run-*"))) == writes_a_log
    assert ("logs in" in said[-1]) is writes_a_log
