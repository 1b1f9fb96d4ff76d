"""What vLLM is told and what is refused on each device; none is needed for it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from disagg.errors import ConfigError
from disagg.workers.engines.vllm import devices
from disagg.workers.options import WorkerOptions

OPTIONS = WorkerOptions("w", "both", "", "tiny", ())


def config(device: str, *, use_mla: bool = False, use_v2: bool = False) -> SimpleNamespace:
    """What is looked at of vLLM's."""
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(use_mla=use_mla),
        use_v2_model_runner=use_v2,
    )


def test_graphs_are_for_gpus() -> None:
    assert devices.arguments("cpu", OPTIONS)["enforce_eager"]
    assert not devices.arguments("cuda", OPTIONS)["enforce_eager"]
    assert devices.arguments("cuda", replace(OPTIONS, cuda_graphs=False))["enforce_eager"]


def test_the_first_model_runner_is_asked_for() -> None:
    assert devices.environment("cuda", 1)["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert "VLLM_USE_V2_MODEL_RUNNER" not in devices.environment("cpu", 1)
    for device in ("cpu", "cuda"):
        devices.check_config(device, config(device))  # control
        with pytest.raises(ConfigError, match="unset VLLM_USE_V2_MODEL_RUNNER"):
            devices.check_config(device, config(device, use_v2=True))


def test_latents_are_for_gpus() -> None:
    devices.check_config("cuda", config("cuda", use_mla=True))
    with pytest.raises(ConfigError, match="latent attention"):
        devices.check_config("cpu", config("cpu", use_mla=True))


def test_another_device_than_vllm_was_built_for() -> None:
    with pytest.raises(ConfigError, match=r"worker\.device=cuda: the vLLM .* computes on cpu"):
        devices.check_config("cuda", config("cpu"))
