"""A checkpoint that no worker can load is refused before anything is started."""

import os
from pathlib import Path

import pytest

from disagg.cluster import local, run_folder
from disagg.cluster.local import LocalCluster
from disagg.config import Settings
from disagg.errors import ConfigError
from tests.checkpoints import make_checkpoint


@pytest.mark.parametrize("engine", ["auto", "vllm"])
@pytest.mark.parametrize("damage", ["cut off", "none", "whole"])
def test_damaged_weights_are_told_before_ray_starts(
    engine: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took 14 to 35 s, as the workers alone looked."""

    def started(*_: object) -> None:
        raise AssertionError("something was started")

    folder = Path(make_checkpoint(tmp_path / "model", "qwen3", num_layers=1))
    weights = folder / "model.safetensors"
    if damage == "cut off":
        weights.write_bytes(weights.read_bytes()[:-4])
    elif damage == "none":
        weights.rename(folder / "pytorch_model.bin")
    runs = tmp_path / "runs"
    runs.mkdir()
    monkeypatch.setattr(run_folder, "PARENT", runs)
    monkeypatch.setattr(local, "adopt_orphans", started)
    given = {"model": {"dir": str(folder)}, "worker": {"engine": engine}}
    cluster = LocalCluster(Settings.model_validate(given))
    if damage == "whole":  # negative control
        with pytest.raises(AssertionError):
            cluster.start()
        return
    with pytest.raises(ConfigError) as refused:
        cluster.start()
    assert refused.value.param == "model.safetensors"
    assert os.listdir(runs) == []
