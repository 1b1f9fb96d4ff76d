"""``python -m demo``: a whole cluster on this machine, real requests, and a drawing of each.

Exit status: 0 all answers were the same as those of one process; 1 they were not, or something
could not be started.
"""

import argparse
import logging
import secrets
import time
from pathlib import Path

import httpx
from openai import OpenAI
from rich.console import Console
from rich.text import Text
from transformers.utils import logging as transformers_logging

from demo.asking import TIMEOUT_S, Answer, ask
from demo.drawing import draw, legend, summary
from demo.prompts import demo_prompts
from demo.single_process import SingleProcess
from demo.tier_drawing import BLOCK_TOKENS
from demo.tiers import show_tiers
from demo.train import make_checkpoint
from demo.training import RECIPE
from disagg.cluster.local import LocalCluster
from disagg.config import Settings
from disagg.errors import DisaggError

MODEL_NAME = "demo"
CHECKPOINT = Path(".cache") / "demo-checkpoint"


def demo_settings(checkpoint: Path) -> Settings:
    """One prefill worker, one decode worker, a router on free ports, small pools."""
    return Settings.model_validate(
        {
            "model": {"dir": str(checkpoint.resolve()), "name": MODEL_NAME},
            "worker": {
                "device": "cpu",
                "dtype": "float32",  # answers are compared with one process's
                "num_threads": 1,
                "num_blocks": 1024,
                "block_tokens": BLOCK_TOKENS,
            },
            "scheduling": {"max_step_tokens": 128, "max_sequences": 16},
            "router": {
                "http_port": 0,
                "admin_port": 0,
                "grpc_port": 0,
                "policy": "prefix_then_load",  # hands all over: that is what is to be seen
            },
            "cluster": {"num_prefill": 1, "num_decode": 1, "hash_key": secrets.token_hex(32)},
        }
    )


def run(console: Console, checkpoint: Path, seed: int) -> bool:
    """Train if need be, serve, send the prompts, draw, stop; returns whether all was right."""
    start_s = time.monotonic()
    console.rule("[bold]1. A small hybrid-attention checkpoint", align="left")
    if make_checkpoint(checkpoint, 0, RECIPE, console) is None:
        return False
    single = SingleProcess(checkpoint)
    console.rule("[bold]2. Ray, one prefill worker, one decode worker, the router", align="left")
    cluster = LocalCluster(
        demo_settings(checkpoint), report=lambda line: console.print(f"  {line}", markup=False)
    )
    answers: list[Answer] = []
    num_right = num_same = 0
    with cluster:
        for worker in cluster.workers:
            console.print(f"  worker {worker.worker_id}: process {worker.pid}")
        console.print(f"  router: process {cluster.router_pid}, {cluster.url}/v1")
        console.rule("[bold]3. Requests through the HTTP port (openai client)", align="left")
        console.print(legend())
        client = OpenAI(
            base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
        )
        with client, httpx.Client(base_url=cluster.admin_url, timeout=TIMEOUT_S) as http:
            for prompt in demo_prompts(seed):
                answer, expected = ask(client, http, MODEL_NAME, prompt), single.answer(prompt)
                num_right += answer.text.strip() == prompt.expected
                num_same += answer.text.strip() == expected
                answers.append(answer)
                console.print(draw(answer, expected))
        summary(console, answers, num_right, num_same)
    good = num_same == len(answers) and not cluster.faults
    console.rule("[bold]4. Tiers: a pool too small, a store on disk, a restart", align="left")
    good = show_tiers(console, demo_settings(checkpoint), seed, single) and good
    console.rule("[bold]5. The end", align="left")
    console.print(
        f"  {'; '.join(cluster.faults) or 'stopped, no process is left'} "
        f"({time.monotonic() - start_s:.0f} s in all)"
    )
    return good


def main() -> int:
    """Run the demo; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="where it is kept")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default 0)")
    options = parser.parse_args()
    console = Console(highlight=False)
    logging.basicConfig(level=logging.WARNING)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        return 0 if run(console, options.checkpoint, options.seed) else 1
    except DisaggError as error:
        console.print(Text.assemble(("error:", "red"), f" {error.message}"))
        return 1
    except KeyboardInterrupt:
        console.print("stopped by Ctrl-C")
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
