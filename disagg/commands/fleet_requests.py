"""Requests to a fleet that runs, and what they took: as a client sees it, and as a worker."""

import http.client
import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from disagg.commands.router_client import call_router
from disagg.config.sources import KEY_VARIABLE
from disagg.errors import ConfigError, RemoteFault, RequestError

ANSWER_S = 600.0
ANSWER_TOKENS = 33
ADMIN_S = 30.0
IDLE_S, IDLE_WAIT_S = 5.0, 0.1
"""What workers say of themselves is some tenths of a second old."""
RECORD_TRIES, RECORD_WAIT_S = 50, 0.02
"""The record of a request is complete shortly after its answer."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request took.

    Attributes:
        compute_ms: of its first token's time, what the worker that prefilled says its steps took;
            None: not asked for.
    """

    ttft_ms: float
    tpot_ms: float
    compute_ms: float | None = None


@dataclass(frozen=True, slots=True)
class RunningFleet:
    """Where requests go.

    Attributes:
        url: of a router's HTTP port.
        model: its name.
        admin: of the same router's admin port; "": workers are not asked what they took.
    """

    url: str
    model: str
    admin: str = ""

    def wait_until_idle(self) -> None:
        """Let requests end that are about to, where there is an admin port to ask.

        Raises:
            RemoteFault: somebody else is being served; nobody answers.
            ConfigError: the URL is none.
        """
        if not self.admin:
            return
        ends_s = time.monotonic() + IDLE_S
        while busy := self._busy():
            if time.monotonic() > ends_s:
                raise RemoteFault(f"the fleet is not idle: {', '.join(busy)} serve requests")
            time.sleep(IDLE_WAIT_S)

    def _busy(self) -> list[str]:
        path = "/v1/disagg/workers"
        workers = call_router(self.admin, path, ADMIN_S, scope="see the workers")["workers"]
        return [
            one["info"]["incarnation"]["worker_id"]
            for one in workers
            if (one["stats"] or {}).get("num_running") or (one["stats"] or {}).get("num_waiting")
        ]

    def ask_at_once(self, num: int, num_prompt: int, beside: int = 0) -> list[Asked]:
        """Ask requests together, with prompts that nobody has asked before.

        Args:
            num: requests.
            num_prompt: tokens of each prompt.
            beside: requests that have their first tokens by then and go on, on other workers.
        """
        with ThreadPoolExecutor(num + beside) as threads:
            begun = [threading.Event() for _ in range(beside)]
            others = [threads.submit(self.ask, num_prompt, one.set) for one in begun]
            for event, other in zip(begun, others, strict=True):
                _wait(event, other)
            asked = [threads.submit(self.ask, num_prompt) for _ in range(num)]
            for other in others:
                other.result()
            return [one.result() for one in asked]

    def ask(self, num_prompt: int, begun: Callable[[], object] = lambda: None) -> Asked:
        """Ask for `ANSWER_TOKENS` tokens.

        Args:
            num_prompt: tokens of its prompt.
            begun: called when the first one has come.

        Raises:
            RemoteFault: nobody answers, or not as a router does.
            ConfigError: the URL is none.
        """
        request_id = f"calibration-{uuid.uuid4().hex}"
        seen_ms = self._stream(prompt_of(num_prompt), request_id, begun)
        tpot_ms = (seen_ms[-1] - seen_ms[0]) / (ANSWER_TOKENS - 1)
        compute_ms = self._compute_ms(request_id) if self.admin else None
        return Asked(seen_ms[0], tpot_ms, compute_ms)

    def _stream(
        self, prompt: list[int], request_id: str, begun: Callable[[], object]
    ) -> list[float]:
        """When each token came, in ms."""
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"{self.url!r} is no http:// URL", param="--fleet")
        asked = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        if key := os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        where = self.url.rstrip("/") + "/v1/completions"
        request = urllib.request.Request(where, json.dumps(asked).encode(), headers)
        seen_ms: list[float] = []
        began_s = time.perf_counter()
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                for line in answer:
                    if line.startswith(b"data: {") and _has_token(line):
                        seen_ms.append((time.perf_counter() - began_s) * 1000)
                        begun()
        except urllib.error.HTTPError as error:
            raise RemoteFault(f"{where} answered {error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            raise RemoteFault(f"nobody answers at {where}: {error}") from error
        if len(seen_ms) < 2:
            raise RemoteFault(f"{where} answered without tokens")
        return seen_ms

    def _compute_ms(self, request_id: str) -> float:
        path = f"/v1/disagg/requests/{request_id}"
        for _ in range(RECORD_TRIES):
            try:
                record = call_router(
                    self.admin, path, ADMIN_S, scope="see this request", unknown=request_id
                )
            except RequestError:
                record = {"generations": ()}
            if record["generations"] and (times := record["generations"][-1]["prefill_times"]):
                return float(times["compute_ms"])
            time.sleep(RECORD_WAIT_S)
        raise RemoteFault(f"{self.admin} does not say what {request_id} took")


def prompt_of(num_tokens: int) -> list[int]:
    """Token ids in an order that no other prompt has."""
    return [random.randrange(10, 250) for _ in range(num_tokens)]


def _wait(event: threading.Event, request: Future[Asked]) -> None:
    while not event.wait(0.05):
        if request.done():
            request.result()  # raises what it raised
            return


def _has_token(line: bytes) -> bool:
    """Whether a line is a chunk of the answer, or an error, which is raised."""
    chunk = json.loads(line[6:])
    if "error" in chunk:
        raise RemoteFault(f"the fleet answered {chunk['error']}")
    return bool(chunk["choices"])
