"""Which engine a worker gets, why, and what is said where none can be had."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from disagg.errors import ConfigError
from disagg.workers import machine
from disagg.workers.engines.choice import build_engine, choose
from disagg.workers.engines.vllm import start, vllm_engine
from disagg.workers.options import WorkerOptions
from tests.checkpoints import edit_config, make_checkpoint

OPTIONS = WorkerOptions("w", "both", "", "tiny", (), device="cpu", dtype="float32", num_blocks=8)
KNOWN = "0.32.0"


@pytest.fixture
def options(tmp_path: Path) -> WorkerOptions:
    return replace(OPTIONS, model_dir=str(make_checkpoint(tmp_path, "qwen3")))


@pytest.fixture
def unknown(options: WorkerOptions) -> WorkerOptions:
    """A model that native refuses."""
    edit_config(options.model_dir, architectures=["DbrxForCausalLM"])
    return options


def install(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(start, "installed_release", lambda: version)


def test_a_named_engine_is_taken(options: WorkerOptions) -> None:
    for name in ("native", "vllm"):
        chosen = choose(replace(options, engine=name))
        assert (chosen.name, chosen.why) == (name, "worker.engine names it")


def test_on_a_cpu_native_is_taken(options: WorkerOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, KNOWN)
    assert choose(options).name == "native"
    assert "no GPU" in choose(options).why
    install(monkeypatch, "")
    assert "vLLM is not installed" in choose(options).why


def test_on_a_gpu_vllm_is_taken(options: WorkerOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, KNOWN)
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    assert choose(replace(options, device="auto")).name == "vllm"
    assert choose(options).name == "native"  # the CPU is asked for
    install(monkeypatch, "0.33.1")
    chosen = choose(replace(options, device="auto"))
    assert chosen.name == "native"
    assert "vLLM 0.32 is needed, 0.33.1 is installed" in chosen.why


def test_what_native_refuses_goes_to_vllm(
    unknown: WorkerOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, KNOWN)
    chosen = choose(unknown)
    assert chosen.name == "vllm"
    assert "DbrxForCausalLM" in chosen.why


def test_a_model_for_nobody_is_refused_with_the_reason_of_each(
    unknown: WorkerOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "")
    with pytest.raises(ConfigError) as caught:
        build_engine(unknown)
    assert "the native engine: config.json: architectures=['DbrxForCausalLM']" in str(caught.value)
    assert "the vllm engine: vLLM is not installed" in str(caught.value)

    def refuse(*_: object) -> None:
        raise ConfigError("vLLM cannot run it: no kernel", param="model")

    install(monkeypatch, KNOWN)
    monkeypatch.setattr(vllm_engine, "build_vllm", refuse)
    with pytest.raises(ConfigError) as caught:
        build_engine(unknown)
    assert "the vllm engine: vLLM cannot run it: no kernel; the native engine: config.json" in str(
        caught.value
    )


def test_no_checkpoint_is_no_matter_of_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "")
    with pytest.raises(ConfigError) as caught:
        build_engine(replace(OPTIONS, model_dir="/nowhere"))
    assert caught.value.message == "no checkpoint directory at /nowhere"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_no_matter_of_engines(
    name: str, unknown: WorkerOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, KNOWN)
    (Path(unknown.model_dir) / name).unlink()
    with pytest.raises(ConfigError) as caught:
        choose(unknown)
    assert caught.value.param == name
    assert "engine" not in caught.value.message


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tensor_parallel": 2}, "worker.tensor_parallel=2: the native engine has one rank"),
        ({"kv_dtype": "fp8"}, "worker.kv_dtype=fp8: the native engine keeps KV in worker.dtype"),
    ],
)
def test_what_native_lacks_is_vllms(changed: dict[str, object], said: str) -> None:
    asked = replace(OPTIONS, **changed)  # type: ignore[arg-type]
    assert choose(asked).name == "vllm"
    with pytest.raises(ConfigError) as caught:
        choose(replace(asked, engine="native"))
    assert caught.value.message == said


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"engine": "vllm"}, "worker.engine names it"),
        ({"tensor_parallel": 2}, "worker.tensor_parallel=2 asks for it"),
        ({"kv_dtype": "fp8"}, "worker.kv_dtype=fp8 asks for it"),
    ],
)
def test_drafts_are_natives(changed: dict[str, object], why: str) -> None:
    drafts = replace(OPTIONS, num_speculative_tokens=4)
    assert choose(drafts).name == choose(replace(drafts, engine="native")).name == "native"
    with pytest.raises(ConfigError, match=f"the vllm engine computes no drafts, and {why}") as one:
        choose(replace(drafts, **changed))  # type: ignore[arg-type]
    assert one.value.param == "scheduling.num_speculative_tokens"


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("", "make install-vllm"),
        ("0.31.9", "0.32 is needed, 0.31.9 is installed"),
        ("0.320.0", "0.32 is needed"),
        (KNOWN, ""),
        ("0.32.1.post1", ""),
        ("0.32.0rc2+cu129", ""),
    ],
)
def test_the_release_is_checked(version: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, version)
    assert said in start.why_not()
    if said:
        with pytest.raises(ConfigError, match=r"worker\.engine=vllm: vLLM"):
            start.check_release()
    else:
        assert start.check_release() == version


def test_the_start_says_which_and_why(
    options: WorkerOptions, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        engine = build_engine(replace(options, engine="native", num_threads=1))
    assert engine.summary.startswith("native (worker.engine names it): cpu, float32")
    messages = [record.message for record in caplog.records]
    assert "worker w takes the native engine: worker.engine names it" in messages
    for phase in ("weights: ", "KV pool: "):
        assert any(message.startswith(phase) for message in messages)
