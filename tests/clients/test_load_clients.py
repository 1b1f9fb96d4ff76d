"""guidellm, aiperf and `vllm bench serve`: all that they ask is answered, in full."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serve_bench.client import BenchError, Load, bench_serve, check_result
from benchmarks.servers.environment import PYTHON
from tests.clients.environments import ClientError, environment_of, run
from tests.clients.served import MODEL, Served

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1_800)]

NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 6, 64, 8
ENDPOINTS = {
    "/v1/completions": "openai",
    "/v1/chat/completions": "openai-chat",
}
LOAD = Load(PROMPT_TOKENS, OUTPUT_TOKENS, 100.0, NUM_REQUESTS)


def bench(served: Served, endpoint: str, tmp_path: Path) -> dict[str, Any]:
    """`vllm bench serve` as `benchmarks.serve_bench` runs it."""
    python = Path(os.environ.get("DISAGG_TEST_VLLM_PYTHON", PYTHON))
    if not python.exists():
        pytest.skip(f"{python} is missing: make install-vllm")
    options = LOAD.options(seed=1)
    result = tmp_path / "result.json"
    return bench_serve(
        python,
        served.url,
        options,
        served.checkpoint,
        result,
        api_key=served.key,
        endpoint=endpoint,
        backend=ENDPOINTS[endpoint],
    )


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_vllm_bench_serve(served: Served, endpoint: str, tmp_path: Path) -> None:
    before = served.num_handed_over()
    result = bench(served, endpoint, tmp_path)
    if endpoint == "/v1/chat/completions":
        # It takes the chunk with the role for a token: as many gaps as tokens.
        assert [len(gaps) for gaps in result["itls"]] == [OUTPUT_TOKENS] * NUM_REQUESTS
        result["itls"] = [gaps[1:] for gaps in result["itls"]]
    check_result(result, LOAD)
    assert served.num_handed_over() >= before + NUM_REQUESTS
    assert result["p99_ttft_ms"] > 0


def test_vllm_bench_serve_notices_a_wrong_key(served: Served, tmp_path: Path) -> None:
    """Control: it ends with an error, or says that its requests failed."""
    with pytest.raises(BenchError):
        check_result(bench(replace(served, key="sk-wrong"), "/v1/completions", tmp_path), LOAD)


def guidellm(served: Served, endpoint: str, cwd: Path) -> dict[str, Any]:
    """A short run; its report of the one benchmark. Its exit status is 0 whatever failed."""
    environment = environment_of("guidellm")
    backend = {
        "kind": "openai_http",
        "target": served.url,
        "api_key": served.key,
        "model": MODEL,
        "request_format": endpoint,
    }
    data = {
        "kind": "synthetic_text",
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
    }
    tokenizer = {"kind": "huggingface_auto", "model": str(served.checkpoint)}
    run(
        [
            *(environment / "bin" / "guidellm", "run", "--disable-console"),
            *("--backend", json.dumps(backend), "--data", json.dumps(data)),
            *("--tokenizer", json.dumps(tokenizer)),
            *("--profile", "kind=synchronous"),
            *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        ],
        cwd=cwd,
        environment={"GUIDELLM__DEFAULT_RESULTS_DIR": str(cwd)},
    )
    (report,) = json.loads((cwd / "benchmarks.json").read_text())["benchmarks"]
    found: dict[str, Any] = report
    return found


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_guidellm(served: Served, endpoint: str, tmp_path: Path) -> None:
    requests = guidellm(served, endpoint, tmp_path)["requests"]
    answers = [one["output_metrics"]["text_tokens"] for one in requests["successful"]]
    assert answers == [OUTPUT_TOKENS] * NUM_REQUESTS
    assert not requests["errored"]
    assert not requests["incomplete"]


def test_guidellm_notices_a_wrong_key(served: Served, tmp_path: Path) -> None:
    """Control: no request counts as served, and none is served."""
    try:
        report = guidellm(replace(served, key="sk-wrong"), "/v1/completions", tmp_path)
    except ClientError:
        return
    assert not report["requests"]["successful"]


def put_into_cache(checkpoint: Path, hub: Path) -> str:
    """Lay a checkpoint where the hub's cache has what it has loaded; returns its name there.

    Offline aiperf takes a tokenizer from that cache alone, and refuses a directory.
    """
    commit, model = "0" * 40, hub / f"models--local--{MODEL}"
    shutil.copytree(checkpoint, model / "snapshots" / commit)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    return f"local/{MODEL}"


def aiperf(served: Served, endpoint: str, cwd: Path, *more: str) -> dict[str, Any]:
    """A short run; what it exports."""
    environment = environment_of("aiperf")
    tokenizer = put_into_cache(served.checkpoint, cwd / "home" / "hub")
    run(
        [
            *(environment / "bin" / "aiperf", "profile", "--model", MODEL, "--url", served.url),
            *("--endpoint-type", endpoint, "--api-key", served.key),
            *("--tokenizer", tokenizer, "--request-count", NUM_REQUESTS),
            *("--synthetic-input-tokens-mean", PROMPT_TOKENS, "--concurrency", 2),
            *("--output-tokens-mean", OUTPUT_TOKENS, "--extra-inputs", "ignore_eos:true"),
            *("--ui", "none", "--output-artifact-dir", cwd / "out", *more),
        ],
        cwd=cwd,
        environment={"HF_HOME": str(cwd / "home")},
    )
    (export,) = (cwd / "out").rglob("profile_export_aiperf.json")
    found: dict[str, Any] = json.loads(export.read_text())
    return found


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_aiperf(served: Served, endpoint: str, stream: bool, tmp_path: Path) -> None:
    found = aiperf(served, endpoint, tmp_path, *["--streaming"] * stream)
    assert found["request_count"]["avg"] == NUM_REQUESTS
    assert not found.get("error_summary")


def test_aiperf_notices_a_wrong_key(served: Served, tmp_path: Path) -> None:
    """Control: it ends with an error, or exports that its requests failed."""
    try:
        found = aiperf(replace(served, key="sk-wrong"), "chat", tmp_path)
    except ClientError:
        return
    assert found.get("error_summary")
    assert found.get("request_count", {"avg": 0})["avg"] == 0
