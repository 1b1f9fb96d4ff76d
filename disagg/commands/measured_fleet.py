"""What a running fleet adds to steps and messages: HTTP, tokens of the text, the plan."""

import http.client
import json
import os
import random
import statistics
import time
import urllib.error
import urllib.request
from dataclasses import replace
from typing import Any

from disagg.commands.simulate import fleet_of
from disagg.config.settings import Settings
from disagg.config.sources import KEY_VARIABLE
from disagg.errors import ConfigError, RemoteFault
from disagg.simulation.curves import Curves
from disagg.simulation.figures import Slos
from disagg.simulation.prompts import TRACE_BLOCK, TraceRequest
from disagg.simulation.world import World

ANSWER_S = 600.0
PROMPT_TOKENS = 48
APART_MS = 60_000.0
NO_SLOS = Slos(0, 0)


def request_ms(
    curves: Curves, settings: Settings, url: str, model: str, repeats: int
) -> tuple[Curves, dict[str, Any]]:
    """Ask small requests one after another, and see how much later their first tokens come.

    Args:
        curves: without that part.
        settings: as the fleet has them.
        url: of its HTTP port; it does nothing else meanwhile.
        model: its name.
        repeats: requests, after the first ones.

    Returns:
        The curves with that part, and what was measured.

    Raises:
        RemoteFault: the fleet does not answer, or refuses.
    """
    for _ in range(2):  # connections, first steps
        first_token_ms(url, model, prompt_of(PROMPT_TOKENS))
    real = [first_token_ms(url, model, prompt_of(PROMPT_TOKENS)) for _ in range(repeats)]
    plan = fleet_of(settings, replace(curves, request_ms=0.0), NO_SLOS)
    # Each has a prompt of its own, and comes when the one before has ended.
    blocks = -(-PROMPT_TOKENS // TRACE_BLOCK)
    trace = [
        TraceRequest(number * APART_MS, PROMPT_TOKENS, 2, (number,) * blocks) for number in range(4)
    ]
    outcomes = World(plan).run(trace)
    simulated = [one.ttft_ms for one in outcomes if one.ttft_ms is not None]
    if not simulated:
        raise ConfigError("the settings' workers answer nothing", param="cluster")
    rest_ms = max(0.0, statistics.median(real) - statistics.median(simulated))
    asked = {
        "num_requests": repeats,
        "prompt_tokens": PROMPT_TOKENS,
        "ttft_ms": [round(one, 3) for one in real],
        "simulated_ttft_ms": round(statistics.median(simulated), 3),
    }
    return replace(curves, request_ms=rest_ms), asked


def prompt_of(num_tokens: int) -> list[int]:
    """Token ids in an order that no other prompt has."""
    return [random.randrange(10, 250) for _ in range(num_tokens)]


def first_token_ms(url: str, model: str, prompt: list[int]) -> float:
    """Ask for two tokens; milliseconds until the first one was there.

    Raises:
        RemoteFault: nobody answers, or not as a router does.
        ConfigError: the URL is none.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is no http:// URL", param="--fleet")
    asked = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 2,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY_VARIABLE):
        headers["Authorization"] = f"Bearer {key}"
    where = url.rstrip("/") + "/v1/completions"
    request = urllib.request.Request(where, json.dumps(asked).encode(), headers)
    began_s = time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            found_ms = None
            for line in answer:
                if found_ms is None and line.startswith(b"data: {"):
                    found_ms = (time.perf_counter() - began_s) * 1000
    except urllib.error.HTTPError as error:
        raise RemoteFault(f"{where} answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise RemoteFault(f"nobody answers at {where}: {error}") from error
    if found_ms is None:
        raise RemoteFault(f"{where} answered without a token")
    return found_ms
