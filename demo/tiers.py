"""Tiers as a user sees them: a pool too small, a store on disk, a restart."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from demo.asking import TIMEOUT_S, Answer, ask
from demo.prompts import DemoPrompt, long_prompts
from demo.single_process import SingleProcess
from demo.tier_drawing import BLOCK_TOKENS, Load, draw_load, tier_legend
from disagg.cluster.local import LocalCluster
from disagg.commands.cache import list_contents
from disagg.config import Settings
from disagg.errors import ConfigError

NUM_BLOCKS = 120
WAIT_S = 30.0
_LOOK_S = 0.05


def tier_settings(settings: Settings, place: Path) -> Settings:
    """One worker of both roles, a pool for one long prompt at a time, a store on disk."""
    changes = {
        "worker": {"num_blocks": NUM_BLOCKS, "tiers": (f"disk:{place}?size=64MiB",)},
        "scheduling": {"max_step_tokens": 64},
        "cluster": {"num_prefill": 0, "num_decode": 0, "num_both": 1},
    }
    given = settings.model_dump()
    return Settings.model_validate(given | {k: given[k] | v for k, v in changes.items()})


def show_tiers(console: Console, settings: Settings, seed: int, single: SingleProcess) -> bool:
    """Ask two long prompts twice each, draw where their KV came from; whether all was right."""
    first, second = long_prompts(seed, lambda prompt: single.answer(prompt) == prompt.expected)
    with tempfile.TemporaryDirectory(prefix="disagg-demo-") as folder:
        place = Path(folder) / "store"
        settings = tier_settings(settings, place)
        good: list[bool] = []
        with _asker(console, settings, single) as asked:
            console.print(tier_legend(NUM_BLOCKS))
            good.append(asked(first, "first time", is_loaded=False))
            good.append(asked(second, "first time; takes the first one's place", is_loaded=False))
            good.append(asked(first, "again", is_loaded=True))
        console.print("  Everything is stopped; the store stays. disagg cache list:")
        list_contents(str(place))
        with _asker(console, settings, single) as asked:
            good.append(asked(second, "again, at a new worker with an empty pool", is_loaded=True))
    console.print(f"{sum(good)} of {len(good)} the same as one process, each block as drawn.")
    return all(good)


@contextmanager
def _asker(
    console: Console, settings: Settings, single: SingleProcess
) -> Iterator[Callable[..., bool]]:
    """Serves; asks a prompt, draws it, and says whether answer and blocks are as they should be.

    Raises:
        ConfigError: something did not start, or did not stop.
    """
    num_asked = 0
    cluster = LocalCluster(settings, report=lambda line: console.print(f"  {line}", markup=False))
    with (
        cluster,
        OpenAI(
            base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
        ) as client,
        httpx.Client(base_url=cluster.admin_url, timeout=TIMEOUT_S) as http,
    ):

        def asked(prompt: DemoPrompt, occasion: str, *, is_loaded: bool) -> bool:
            nonlocal num_asked
            num_asked += 1
            before = _counts(http)
            answer = ask(client, http, settings.model.name, prompt, f"tiers-{num_asked}")
            load = _load_of(http, before, answer)
            expected = single.answer(prompt)
            console.print(draw_load(answer, expected, occasion, load))
            return (
                answer.text.strip() == expected
                and bool(load.hit_tokens) == is_loaded
                and load.num_read == load.num_loaded
            )

        # A new worker's first request takes longer, whatever it asks.
        client.completions.create(model=settings.model.name, prompt="?", max_tokens=1)
        yield asked
    if cluster.faults:
        raise ConfigError("; ".join(cluster.faults))


def _load_of(http: httpx.Client, before: dict[str, float], answer: Answer) -> Load:
    """Where the KV of an answer came from; waits until what was computed is on the disk."""
    deadline = time.monotonic() + WAIT_S
    while True:
        now = _counts(http)
        load = Load.of(answer, {name: now[name] - before.get(name, 0) for name in now})
        num_filled = (answer.num_prompt_tokens + answer.num_tokens - 1) // BLOCK_TOKENS
        is_over = (
            load.num_read >= load.num_loaded
            if load.hit_tokens
            else load.num_written >= num_filled * len(load.maps)
        )
        if is_over or time.monotonic() > deadline:
            return load
        time.sleep(_LOOK_S)


def _counts(http: httpx.Client) -> dict[str, float]:
    """The worker's counters, as the router's ``/metrics`` has them."""
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {
        sample.name.removeprefix("disagg_worker_").removesuffix("_total"): sample.value
        for family in families
        if family.name.startswith("disagg_worker_tier_") and family.type == "counter"
        for sample in family.samples
        if sample.name.endswith("_total")
    }
