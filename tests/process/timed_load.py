"""Streams that follow each other for as long as a test wants, every token checked and timed."""

import contextlib
import itertools
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.checkpoints import reference_generate
from tests.process.harness import MODEL, wait_until
from tests.process.replicas import stream

NUM_STREAMS = 6
NUM_PROMPTS = 6
PROMPT_TOKENS = (40, 150)
NUM_TOKENS = 64
GAP_MIN = 1e-3
REQUEST_S = 240.0
"""Only a request that nobody ends takes so long."""


@dataclass(frozen=True)
class Expected:
    """A prompt and what plain transformers in one process makes of it."""

    prompt: list[int]
    token_ids: list[int]


def expect(
    model_dir: Path, length: int, num_tokens: int, salt: str, start: Sequence[int] = ()
) -> Expected:
    """A prompt whose every token the reference is clear about."""
    for attempt in range(200):
        rng = random.Random(f"{salt}/{attempt}")
        prompt = [*start, *(rng.randrange(7, 101) for _ in range(length - len(start)))]
        token_ids, _, gap = reference_generate(model_dir, prompt, num_tokens)
        if gap > GAP_MIN:
            return Expected(prompt, list(token_ids))
    raise AssertionError("no prompt whose answer is clear")


def clear_prompts(model_dir: Path) -> list[Expected]:
    """Prompts of several lengths."""
    shortest, longest = PROMPT_TOKENS
    step = (longest - shortest) // (NUM_PROMPTS - 1)
    return [
        expect(model_dir, shortest + step * number, NUM_TOKENS, f"prompt {number}")
        for number in range(NUM_PROMPTS)
    ]


@dataclass
class Sent:
    """One request of the load."""

    request_id: str
    url: str
    expected: Expected
    began_s: float
    token_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    error: str = ""
    ended_s: float = 0.0

    def stood_s(self, from_s: float) -> float:
        """Longest time without a token since then."""
        times = [max(from_s, one) for one in (self.began_s, *self.token_s, self.ended_s)]
        return max(later - one for one, later in itertools.pairwise(times))


class Load:
    """Streams that follow each other. A router that cannot be reached, or breaks off, is left."""

    def __init__(self, urls: Sequence[str], prompts: Sequence[Expected]) -> None:
        self.sent: list[Sent] = []
        self._urls, self._prompts = urls, prompts
        self._ends = threading.Event()
        self._wrong: list[str] = []
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(NUM_STREAMS)
        ]
        for thread in self._threads:
            thread.start()

    def num_tokens(self, since_s: float = 0.0) -> int:
        """Tokens that have come since a time."""
        return sum(one > since_s for sent in list(self.sent) for one in list(sent.token_s))

    def end(self) -> None:
        """Let the last requests end; all that came was right, or said why not."""
        self._ends.set()
        for thread in self._threads:
            thread.join(REQUEST_S + 60)
            assert not thread.is_alive(), "a request does not end"
        assert not self._wrong, self._wrong

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        clients = {url: httpx.Client(base_url=url, timeout=REQUEST_S) for url in self._urls}
        router = number % len(self._urls)
        for turn in range(1 << 30):
            if self._ends.is_set():
                return
            url = self._urls[router]
            request_id = f"load-{time.monotonic_ns()}-{number}-{turn}"
            sent = Sent(request_id, url, rng.choice(self._prompts), time.monotonic())
            self.sent.append(sent)
            if not self._stream(clients[url], sent):
                router = (router + 1) % len(self._urls)
                time.sleep(0.05)

    def _stream(self, client: httpx.Client, sent: Sent) -> bool:
        """Returns whether the router answered."""
        expected = sent.expected
        body = {
            "model": MODEL,
            "prompt": expected.prompt,
            "max_tokens": len(expected.token_ids),
            "temperature": 0,
            "return_token_ids": True,
            "ignore_eos": True,
        }
        done = False
        try:
            for event in stream(client, body, sent.request_id):
                if event == "[DONE]":
                    done = True
                    continue
                said = json.loads(event)
                if "error" in said:
                    sent.error = said["error"]["message"] or "an error that says nothing"
                    continue
                new = said["choices"][0].get("token_ids") or []
                sent.token_ids += new
                sent.token_s += [time.monotonic()] * len(new)
        except httpx.HTTPStatusError as error:
            sent.error = error.response.text
        except httpx.TransportError as error:
            sent.error = f"no connection: {error!r}"
        sent.ended_s = time.monotonic()
        begun = expected.token_ids[: len(sent.token_ids)]
        if sent.token_ids != begun or not (sent.error or (done and begun == expected.token_ids)):
            self._wrong.append(f"{sent.request_id}: {sent.token_ids} instead of {expected}")
        return not sent.error.startswith("no connection")


@contextlib.contextmanager
def load(urls: Sequence[str], prompts: Sequence[Expected]) -> Iterator[Load]:
    """Load until the end, which waits for every request."""
    made = Load(urls, prompts)
    try:
        wait_until(lambda: made.num_tokens() > NUM_STREAMS * NUM_TOKENS, "load", REQUEST_S)
        yield made
    finally:
        made.end()
