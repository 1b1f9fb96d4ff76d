"""What a running fleet adds to steps and messages: HTTP, tokens of the text, the worker's own work.

An engine that is measured alone has the machine and the interpreter for itself. In a worker it
shares them with streams, in a fleet of one machine also with router and clients.
"""

import http.client
import json
import os
import random
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from disagg.commands.simulate import fleet_of
from disagg.config.settings import Settings
from disagg.config.sources import KEY_VARIABLE
from disagg.errors import ConfigError, RemoteFault
from disagg.simulation.curves import Curves
from disagg.simulation.figures import Slos
from disagg.simulation.prompts import TraceRequest
from disagg.simulation.world import World

ANSWER_S = 600.0
PROMPT_TOKENS, ANSWER_TOKENS = 48, 33
LONG_PROMPT_TOKENS = 1_024
"""At most half of what the model takes."""
STREAMS_PER_WORKER = 4
"""At once, where what a sequence adds to a step is measured."""
APART_MS = 60_000.0
NO_SLOS = Slos(0, 0)


@dataclass(frozen=True, slots=True)
class Asked:
    """What small requests took."""

    ttft_ms: float
    tpot_ms: float


def ask_fleet(
    curves: Curves, settings: Settings, url: str, model: str, repeats: int
) -> tuple[Curves, dict[str, Any]]:
    """Ask requests, one alone, several at once, and a long one; see how much longer all takes.

    What a step takes more is seen in the time between the tokens of one request, what a sequence
    takes more in that of several at once, what a request and its tokens take more in the first
    tokens of a short and a long one.

    Args:
        curves: without these parts.
        settings: as the fleet has them.
        url: of its HTTP port; it does nothing else meanwhile.
        model: its name.
        repeats: rounds, after a first one.

    Returns:
        The curves with these parts, and what was measured.

    Raises:
        RemoteFault: the fleet does not answer, or refuses.
        ConfigError: the settings' workers answer nothing.
    """
    num_at_once, long = STREAMS_PER_WORKER * num_decoding(settings), long_prompt(curves)
    shapes = ((1, PROMPT_TOKENS), (num_at_once, PROMPT_TOKENS), (1, long))
    for num, num_tokens in shapes:  # connections, first steps
        _ask_at_once(url, model, num, num_tokens)
    rounds = [
        [_medians(_ask_at_once(url, model, num, num_tokens)) for num, num_tokens in shapes]
        for _ in range(repeats)
    ]
    real = [_fast(same) for same in zip(*rounds, strict=True)]
    before, after = replace(curves, request_ms=0.0), with_serving(curves, settings, *real)
    return after, {
        "num_rounds": repeats,
        "answer_tokens": ANSWER_TOKENS,
        "requests": [
            {
                "at_once": num,
                "prompt_tokens": num_tokens,
                "measured_ms": asdict(one),
                "simulated_before_ms": asdict(simulated(before, settings, num, num_tokens)),
                "simulated_ms": asdict(simulated(after, settings, num, num_tokens)),
            }
            for (num, num_tokens), one in zip(shapes, real, strict=True)
        ],
    }


def long_prompt(curves: Curves) -> int:
    """Tokens of the long one of the prompts that are asked."""
    return min(LONG_PROMPT_TOKENS, curves.max_model_tokens // 2)


def with_serving(
    curves: Curves, settings: Settings, alone: Asked, several: Asked, long: Asked
) -> Curves:
    """Curves with which requests alone, and `STREAMS_PER_WORKER` at once, take so long.

    Args:
        curves: whatever they have of these parts is forgotten.
        settings: of the fleet.
        alone: what a request took.
        several: what each of them took.
        long: what a request with a long prompt took.
    """
    curves = replace(
        curves, request_ms=0.0, request_token_ms=0.0, step_more_ms=0.0, sequence_more_ms=0.0
    )
    step_ms = max(0.0, alone.tpot_ms - simulated(curves, settings, 1).tpot_ms)
    num_at_once = STREAMS_PER_WORKER * num_decoding(settings)
    rest_ms = several.tpot_ms - step_ms - simulated(curves, settings, num_at_once).tpot_ms
    # The one sequence of a step of one is part of that.
    sequence_ms = min(step_ms, max(0.0, rest_ms / (STREAMS_PER_WORKER - 1)))
    curves = replace(curves, step_more_ms=step_ms - sequence_ms, sequence_more_ms=sequence_ms)
    num_long = long_prompt(curves)
    request_ms = max(0.0, alone.ttft_ms - simulated(curves, settings, 1).ttft_ms)
    long_ms = max(0.0, long.ttft_ms - simulated(curves, settings, 1, num_long).ttft_ms)
    token_ms = max(0.0, (long_ms - request_ms) / max(1, num_long - PROMPT_TOKENS))
    request_ms = max(0.0, request_ms - PROMPT_TOKENS * token_ms)
    return replace(curves, request_ms=request_ms, request_token_ms=token_ms)


def num_decoding(settings: Settings) -> int:
    """Workers among which streams are shared."""
    return settings.cluster.num_both or settings.cluster.num_decode


def _fast(found: Sequence[Asked]) -> Asked:
    """Faster than three quarters: what disturbs a machine adds time, and never takes any."""
    return Asked(
        sorted(one.ttft_ms for one in found)[len(found) // 4],
        sorted(one.tpot_ms for one in found)[len(found) // 4],
    )


def _medians(found: Sequence[Asked]) -> Asked:
    return Asked(
        statistics.median(one.ttft_ms for one in found),
        statistics.median(one.tpot_ms for one in found),
    )


def simulated(
    curves: Curves, settings: Settings, num_at_once: int, num_tokens: int = PROMPT_TOKENS
) -> Asked:
    """The same requests in virtual time, after as many that nobody counts."""
    trace = [
        TraceRequest(
            number // num_at_once * APART_MS,
            num_tokens,
            ANSWER_TOKENS,
            (),
            (number,) * num_tokens,
        )
        for number in range(3 * num_at_once)
    ]
    outcomes = World(fleet_of(settings, curves, NO_SLOS)).run(trace)[num_at_once:]
    found = [
        Asked(one.ttft_ms, one.tpot_ms)
        for one in outcomes
        if one.ttft_ms is not None and one.tpot_ms is not None
    ]
    if not found:
        raise ConfigError("the settings' workers answer nothing", param="cluster")
    return _medians(found)


def _ask_at_once(url: str, model: str, num: int, num_tokens: int) -> list[Asked]:
    with ThreadPoolExecutor(num) as threads:
        asked = [threads.submit(ask, url, model, prompt_of(num_tokens)) for _ in range(num)]
        return [one.result() for one in asked]


def prompt_of(num_tokens: int) -> list[int]:
    """Token ids in an order that no other prompt has."""
    return [random.randrange(10, 250) for _ in range(num_tokens)]


def ask(url: str, model: str, prompt: list[int]) -> Asked:
    """Ask for `ANSWER_TOKENS`; when they came.

    Raises:
        RemoteFault: nobody answers, or not as a router does.
        ConfigError: the URL is none.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is no http:// URL", param="--fleet")
    asked = {
        "model": model,
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
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
            seen_ms = [
                (time.perf_counter() - began_s) * 1000
                for line in answer
                if line.startswith(b"data: {") and _has_token(line)
            ]
    except urllib.error.HTTPError as error:
        raise RemoteFault(f"{where} answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise RemoteFault(f"nobody answers at {where}: {error}") from error
    if len(seen_ms) < 2:
        raise RemoteFault(f"{where} answered without tokens")
    return Asked(seen_ms[0], (seen_ms[-1] - seen_ms[0]) / (ANSWER_TOKENS - 1))


def _has_token(line: bytes) -> bool:
    """Whether a line is a chunk of the answer, or an error, which is raised."""
    chunk = json.loads(line[6:])
    if "error" in chunk:
        raise RemoteFault(f"the fleet answered {chunk['error']}")
    return bool(chunk["choices"])
