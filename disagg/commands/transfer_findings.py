"""Real hand-overs between every pair of workers, each measured by who read it."""

import http.client
import json
import random
import secrets
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from disagg.cluster.http_calls import call
from disagg.commands.finding import Finding, fault, note, ok, warning
from disagg.commands.router_client import ANSWER_BYTES_MAX, call_router, own_key
from disagg.errors import RemoteFault

ROUNDS_MAX = 6
PAIRS_MAX = 64
"""Of more pairs these many are asked for, in each round."""
AT_ONCE = 16
OUTPUT_TOKENS = 4
WORDS = ("lease", "block", "window", "prefix", "owner", "reader", "commit", "epoch", "router")
FAULTS = ("read_failed", "read_stuck", "commit_refused", "lease_dead", "peer_lost")

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Ports:
    """Where a router is asked, and how long its answers are waited for."""

    admin_url: str
    http_url: str
    timeout_s: float


def measure_pairs(body: dict[str, Any], ports: Ports, num_words: int) -> Iterator[Finding]:
    """Send prompts nobody has cached until every pair has handed one over, or `ROUNDS_MAX` times.

    The router chooses the pairs, as it does for every request: an idle fleet shares them out.

    Args:
        body: the fleet as `status_view.fetch` has it.
        ports: of the router.
        num_words: of a prompt; more words, larger transfers.
    """
    wanted = pairs_of(body["workers"])
    if not wanted:
        yield note("transfers", "no two ready workers that could hand over to each other")
        return
    seen: dict[Pair, str] = {}
    failed: dict[Pair, str] = {}
    model = body["router"]["model"]
    for _ in range(ROUNDS_MAX):
        num = min(2 * len(wanted - seen.keys()), PAIRS_MAX)
        if not num:
            break
        try:
            with ThreadPoolExecutor(min(num, AT_ONCE)) as threads:
                records = list(
                    threads.map(lambda _: _hand_over(ports, model, num_words), range(num))
                )
        except RemoteFault as error:
            advice = "name the clients' port with --http-url; the key needs serve and observe"
            yield fault("transfers", error.message, advice)
            return
        for record in records:
            for one in record["generations"]:
                pair = (one["prefill"]["worker_id"], one["decode"]["worker_id"])
                if one["transfer"] is not None:
                    seen[pair] = measured(one["transfer"])
                elif one["cause"] in FAULTS:
                    failed[pair] = one["cause"]
    for pair in sorted(wanted | failed.keys() | seen.keys()):
        yield _judge(pair, seen.get(pair), failed.get(pair))


def pairs_of(workers: list[dict[str, Any]]) -> set[Pair]:
    """Who may hand over to whom: ready workers of one revision, by their roles."""
    ready = [one for one in workers if one["state"] == "ready"]
    return {
        (one["worker_id"], other["worker_id"])
        for one in ready
        for other in ready
        if one["role"] == "prefill"
        and other["role"] == "decode"
        and one["revision"] == other["revision"]
    }


def measured(transfer: dict[str, Any]) -> str:
    """Bytes, time and bandwidth of a committed transfer, as its reader reported them."""
    num_bytes = sum(group["pulled_bytes"] for group in transfer["groups"])
    # Milliseconds are whole: what took less than one is at least so fast.
    at_least = "" if transfer["read_ms"] else "over "
    read_s = max(transfer["read_ms"], 1) / 1000
    rate = f"{at_least}{num_bytes / read_s / 1e6:.1f} MB/s"
    return (
        f"{num_bytes / 1024:.0f} KiB in {transfer['num_reads']} READs, "
        f"{transfer['read_ms']} ms: {rate}"
    )


def _judge(pair: Pair, seen: str | None, failed: str | None) -> Finding:
    name = f"{pair[0]} → {pair[1]}"
    if failed is not None:
        advice = (
            "see both logs; let worker.transfer_port through between the hosts (docs/security.md), "
            "and set UCX_NET_DEVICES where a host has several networks"
        )
        return fault(name, f"a hand-over failed: {failed}" + (f"; {seen}" if seen else ""), advice)
    if seen is None:
        advice = "again while the fleet is idle; a pair that failed rests for a while (see the log)"
        return warning(name, "the router handed nothing over between them", advice)
    return ok(name, seen)


def _hand_over(ports: Ports, model: str, num_words: int) -> dict[str, Any]:
    """One request with a prompt of its own; its record.

    Raises:
        RemoteFault: it was refused, or nobody answers.
    """
    request_id = f"doctor-{secrets.token_hex(8)}"
    words = (random.choice(WORDS) for _ in range(num_words))
    prompt = f"{secrets.token_hex(8)} {' '.join(words)}"
    asked = {
        "model": model,
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "disagg": {"hand_over": True},  # whatever is faster just now
    }
    headers = own_key() | {"Content-Type": "application/json", "X-Request-Id": request_id}
    url = ports.http_url.rstrip("/") + "/v1/completions"
    try:
        request = urllib.request.Request(url, json.dumps(asked).encode(), headers)
        call(request, ports.timeout_s, ANSWER_BYTES_MAX)
    except urllib.error.HTTPError as error:
        raise RemoteFault(f"{url} answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:  # the last: no URL
        raise RemoteFault(f"nobody answers at {url}: {getattr(error, 'reason', error)}") from error
    path = f"/v1/disagg/requests/{quote(request_id, safe='')}"
    return call_router(ports.admin_url, path, ports.timeout_s, scope="observe")
