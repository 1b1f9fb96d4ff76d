"""`disagg plan` as a process."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import make_no_file

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "tests" / "data" / "model_configs" / "gemma-3-27b.json"


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "disagg.commands", "plan", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def model(tmp_path: Path) -> str:
    shutil.copy(CONFIG, tmp_path / "config.json")
    return str(tmp_path)


def test_the_table_for_people(model: str) -> None:
    run = plan("--model", model, "--memory", "64GiB", "--context", "131072")
    assert (run.returncode, run.stderr) == (0, "")
    assert "52,428 blocks of 1.25 MiB in 64 GiB, sequences of 131,072 tokens" in run.stdout
    rows = [line.split() for line in run.stdout.splitlines()]
    assert ["6", "full_attention", "10", "-", "16", "81,920", "-", "0", "8,192"] in rows
    assert ["this", "plan", "800,712", "6", "10.48", "GiB"] in rows
    assert ["all", "layers", "full", "135,280", "1", "62", "GiB"] in rows


def test_json_for_programs(model: str) -> None:
    run = plan("--model", model, "--memory", "64GiB", "--json")
    answer = json.loads(run.stdout)
    assert answer["context_tokens"] == 131_072  # the family's default, absent from the file
    assert answer["num_sequences"] == 6
    assert answer["all_layers_full"]["num_sequences"] == 1
    assert [group["num_layers"] for group in answer["groups"]] == [9, 9, 9, 9, 8, 8, 10]


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "device", "directory"])
def test_a_config_that_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    run = plan("--model", str(tmp_path), "--memory", "1GiB")
    assert "config.json is missing" in run.stderr  # negative control
    config = make_no_file(tmp_path, kind)
    run = plan("--model", str(tmp_path), "--memory", "1GiB")
    assert run.returncode == 2
    assert run.stderr.startswith(f"disagg: {config}: ")


def test_a_config_behind_a_link_is_read(model: str, tmp_path: Path) -> None:
    """Those in Hugging Face's cache are."""
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "config.json").symlink_to(Path(model) / "config.json")
    run = plan("--model", str(tmp_path / "links"), "--memory", "64GiB")
    assert (run.returncode, run.stderr) == (0, "")


def test_weights_in_pytorchs_own_format_are_told(model: str) -> None:
    """The plan needs no weights."""
    (Path(model) / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    run = plan("--model", model, "--memory", "64GiB")
    assert run.returncode == 0
    assert "blocks of" in run.stdout
    assert "PyTorch's own format alone (pytorch_model-00001-of-00002.bin)" in run.stderr
    (Path(model) / "model.safetensors").write_bytes(b"")
    assert plan("--model", model, "--memory", "64GiB").stderr == ""


def test_the_vllm_engines_blocks_hold_whole_states(tmp_path: Path) -> None:
    """Without vLLM: from the config alone."""
    shutil.copy(CONFIG.with_name("qwen3-next-80b-a3b.json"), tmp_path / "config.json")
    flags = ["--model", str(tmp_path), "--memory", "64GiB", "--context", "131072"]
    native, vllm = (
        json.loads(plan(*flags, "--engine", engine, "--device", "cuda", "--json").stdout)
        for engine in ("native", "vllm")
    )
    assert (native["engine"], vllm["engine"]) == ("native", "vllm")
    assert [group["blocks_per_state"] for group in native["groups"]] == [197, 1]
    assert {group["blocks_per_state"] for group in vllm["groups"]} == {1}
    run = plan(*flags, "--engine", "vllm", "--device", "cuda")
    assert "5,295 blocks of 12.38 MiB" in run.stdout
    rows = [" ".join(line.split()) for line in run.stdout.splitlines()]
    assert "0 linear_state 6 - 528 - 12.38 MiB in 1 block 96 KiB (0.8%) 2" in rows
    assert "6 full_attention 12 - 528 24,576 - 0 249" in rows


def test_the_engines_agree_where_there_is_no_state(model: str) -> None:
    flags = ["--model", model, "--memory", "64GiB", "--json"]
    native, on_gpu, on_cpu, larger = (
        json.loads(plan(*flags, *more.split()).stdout)
        for more in (
            "",
            "--engine vllm --device cuda",
            "--engine vllm --device cpu",
            "--block-tokens 32",
        )
    )
    assert {**native, "engine": "vllm"} == on_gpu
    assert larger["block_bytes"] == 2 * native["block_bytes"]
    assert {**larger, "engine": "vllm"} == on_cpu  # its kernels take multiples of 32


def test_blocks_that_the_worker_would_refuse(model: str) -> None:
    flags = ["--model", model, "--memory", "64GiB", "--engine", "vllm", "--block-tokens", "16"]
    run = plan(*flags, "--device", "cpu")
    assert run.returncode == 2
    assert "takes multiples of 32, not 16; 32 would do" in run.stderr
    run = plan(*flags, "--device", "cuda")  # control
    assert "tokens, vllm engine on cuda" in run.stdout


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"--memory": "lots"}, "memory: 'lots' is not a size such as 64GiB"),
        ({"--memory": "1MiB"}, "memory: 1048576 bytes hold fewer than two blocks of 1310720"),
        ({"--model": "nowhere"}, "nowhere/config.json is missing"),
        ({"--context": "0"}, "context: must be a positive number"),
        ({"--context": "131073"}, "context: 131073 tokens, the model's positions reach 131072"),
    ],
)
def test_errors_are_one_clear_line(model: str, change: dict[str, str], said: str) -> None:
    flags = {"--model": model, "--memory": "64GiB", **change}
    run = plan(*(text for pair in flags.items() for text in pair))
    assert run.returncode == 2
    assert run.stderr.startswith("disagg: ")
    assert said in run.stderr
    assert run.stdout == ""


def test_an_unsupported_architecture_is_named(model: str) -> None:
    (Path(model) / "config.json").write_text('{"architectures": ["WhisperForCausalLM"]}')
    run = plan("--model", model, "--memory", "64GiB")
    assert run.returncode == 2
    assert "WhisperForCausalLM" in run.stderr


def test_a_config_nested_too_deep_is_one_clear_line(model: str) -> None:
    (Path(model) / "config.json").write_text("[" * 200_000)
    run = plan("--model", model, "--memory", "64GiB")
    assert run.returncode == 2
    assert run.stderr.startswith(f"disagg: {model}/config.json: maximum recursion depth")
