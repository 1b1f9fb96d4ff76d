"""A cluster that serves a tiny checkpoint, and what plain transformers says it must answer."""

import json
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai.types import Completion
from transformers import AutoTokenizer

from tests.checkpoints import reference_generate
from tests.process.harness import MODEL, Cluster, wait_until

GAP_MIN = 1e-3
LOGPROB_TOLERANCE = 1e-4
BLOCK_TOKENS = 16
WINDOW = 32
PRINTABLE_IDS = (*range(7, 101), *range(263, 320))
"""Others are parts of characters, which an answer's text cannot be compared after."""
TRIES = 50
"""Prompts drawn until the reference is clear about every token."""


@dataclass(frozen=True)
class Expected:
    """A prompt and its greedy continuation by plain transformers."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    """Of each token."""
    logprobs: tuple[float, ...]
    min_gap: float
    """Smallest distance between the two best logits."""
    tolerance: float
    """Of the served logprobs."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def whole(self) -> tuple[int, ...]:
        """Prompt and continuation."""
        return self.prompt + self.token_ids


class ServedModel:
    """One checkpoint under a router, a prefill worker ``p0`` and a decode worker ``d0``.

    Attributes:
        eos_id: a token that ends requests although the model likes it; `prompt` avoids it.
        tolerance: of logprobs.
        gap_min: by which every token of a `prompt` wins.
    """

    def __init__(
        self,
        cluster: Cluster,
        eos_id: int = -1,
        tolerance: float = LOGPROB_TOLERANCE,
        gap_min: float = GAP_MIN,
    ) -> None:
        self.cluster = cluster
        self.eos_id = eos_id
        self.tolerance = tolerance
        self.gap_min = gap_min
        self._tokenizer: Any = AutoTokenizer.from_pretrained(cluster.model_dir)
        self._expected: dict[tuple[object, ...], Expected] = {}
        self._num_asked = 0
        self._threads = ThreadPoolExecutor(32)

    def expect(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        adjust: Callable[[torch.Tensor, Sequence[int]], torch.Tensor] | None = None,
    ) -> Expected:
        """Ask the reference, whose logits ``adjust`` may change."""
        key = tuple(prompt), num_tokens, adjust
        if key not in self._expected:
            token_ids, logprobs, min_gap = reference_generate(
                self.cluster.model_dir, prompt, num_tokens, adjust
            )
            texts = tuple(self._tokenizer.decode([token]) for token in token_ids)
            self._expected[key] = Expected(
                tuple(prompt), tuple(token_ids), texts, tuple(logprobs), min_gap, self.tolerance
            )
        return self._expected[key]

    def prompt(
        self, length: int, num_tokens: int = 12, *, start: Sequence[int] = (), salt: str = ""
    ) -> Expected:
        """A prompt of ``length`` tokens after ``start``, the same for the same arguments.

        Drawn again until every one of the reference's tokens wins clearly.
        """
        for attempt in range(TRIES):
            seed = f"{salt}/{length}/{attempt}"
            rng = random.Random(seed)
            drawn = rng.choices(PRINTABLE_IDS, k=length - len(start))
            expected = self.expect([*start, *drawn], num_tokens)
            if expected.min_gap > self.gap_min and self.eos_id not in expected.token_ids:
                return expected
        raise AssertionError(f"no clear prompt of {length} tokens after {len(start)}, salt {salt}")

    def template(self, messages: list[dict[str, str]]) -> list[int]:
        """Tokens of a chat."""
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def new_id(self) -> str:
        """An id for a request."""
        self._num_asked += 1
        return f"test-{self._num_asked}"

    def body(self, expected: Expected, **more: Any) -> dict[str, Any]:
        """A completion request for as many tokens as are expected."""
        plain = {
            "model": MODEL,
            "prompt": list(expected.prompt),
            "max_tokens": expected.num_tokens,
            "temperature": 0.0,
            "logprobs": 1,
        }
        return plain | more

    def ask(self, expected: Expected, request_id: str = "", **more: Any) -> Completion:
        """Send it with OpenAI's client."""
        return self.cluster.client.completions.create(
            **self.body(expected, **more),
            extra_headers={"X-Request-Id": request_id or self.new_id()},
        )

    def ask_later(self, expected: Expected, request_id: str) -> Future[Completion]:
        """Send it from a thread, to wait for what it meets meanwhile."""
        return self._threads.submit(self.ask, expected, request_id)

    def serve(self, expected: Expected) -> dict[str, Any]:
        """Ask, check the answer, check that it was handed over at once; the generation's record."""
        request_id = self.new_id()
        assert_exact(self.ask(expected, request_id), expected)
        # The prefill worker's report has a stream of its own: it may come after all tokens.
        wait_until(lambda: is_reported(self.cluster.record(request_id)), "the prefill's report")
        return handed_over(self.cluster.record(request_id))

    def restore(self) -> None:
        """Revive the dead, forget all prefixes, poison what is free, as before every test."""
        cluster = self.cluster
        dead = sorted(set(cluster.workers) - set(cluster.living()))
        for name in dead:
            cluster.spawn(name, {"p": "prefill", "d": "decode"}[name[0]])
        cluster.wait_ready(*cluster.workers)
        cluster.wait_quiescent()
        for name in cluster.workers:
            for line in ("intact", "narrow 0", "forget", "poison"):
                cluster.tell(name, line)
        wait_until(lambda: not self.num_cached(), "the router to hear that nothing is cached")

    def settle(self) -> None:
        """Open every gate; then nothing may be held by anybody."""
        for name in self.cluster.living():
            for gate in ("steps", "reads", "dones", "checks"):
                self.cluster.tell(name, f"pass {gate}")
        self.cluster.wait_quiescent()
        self.wait_idle()

    def num_cached(self) -> int:
        """Blocks that the router believes to be cached anywhere."""
        return sum(view["index_entries"] for view in self.cluster.known().values())

    def wait_idle(self) -> None:
        """Until the router too knows that nothing goes on; its next choice is then by name."""
        http = self.cluster.http
        wait_until(lambda: http.get("/health").json()["num_requests"] == 0, "the router to be idle")

        def busy() -> list[Any]:
            return [view for view in self.cluster.known().values() if is_busy(view)]

        wait_until(lambda: not busy(), "the workers to be idle for the router")


def is_busy(view: dict[str, Any]) -> bool:
    """Whether a worker has anything to do, or blocks in use, as the router sees it."""
    stats = view["stats"]
    if stats is None:  # its session was opened anew, and has not reported yet
        return True
    return bool(
        view["planned_requests"]
        or stats["num_running"]
        or stats["num_waiting"]
        or stats["num_blocks_free"] != stats["num_blocks_usable"]
    )


def is_reported(record: dict[str, Any]) -> bool:
    """Whether the router knows what the last prefill found in its cache."""
    return record["generations"][-1]["hit_tokens"] is not None


class WrongAnswerError(AssertionError):
    """Other tokens or logprobs than plain transformers computes: the one thing never served."""


def assert_exact(completion: Completion, expected: Expected) -> None:
    """The reference's tokens, and its logprobs, in float32 to 1e-4."""
    assert expected.min_gap > GAP_MIN
    (choice,) = completion.choices
    assert choice.logprobs is not None
    texts, logprobs = choice.logprobs.tokens, choice.logprobs.token_logprobs
    if texts != list(expected.texts) or choice.text != "".join(expected.texts):
        raise WrongAnswerError(f"{texts} ({choice.text!r}) instead of {expected}")
    if logprobs != pytest.approx(list(expected.logprobs), abs=expected.tolerance):
        raise WrongAnswerError(f"logprobs {logprobs} instead of {expected}")
    assert choice.finish_reason == "length", choice.finish_reason
    assert completion.usage is not None
    assert completion.usage.completion_tokens == expected.num_tokens
    assert completion.usage.prompt_tokens == len(expected.prompt)


def is_exact(ask: Callable[[], Completion], expected: Expected) -> bool:
    """The only two ends there are: the reference's tokens, or an error in OpenAI's schema."""
    try:
        completion = ask()
    except openai.APIStatusError as error:
        failure = error
    else:
        assert_exact(completion, expected)
        return True
    body: Any = failure.body
    assert failure.status_code >= 500, failure
    assert set(body) == {"message", "type", "param", "code"}, body
    assert body["type"] == "server_error", body
    assert body["code"], body
    return False


def handed_over(record: dict[str, Any]) -> dict[str, Any]:
    """The only generation of a request that was pulled and never planned anew."""
    assert len(record["generations"]) == 1, record
    (generation,) = record["generations"]
    assert not generation["local"], generation["reason"]
    assert generation["prefill"]["worker_id"][0] == "p", generation
    assert generation["decode"]["worker_id"][0] == "d", generation
    assert pulled_bytes(generation) > 0, generation
    assert generation["cause"] == "", generation
    assert record["outcome"] == "length", record
    checked: dict[str, Any] = generation
    return checked


def pulled_bytes(generation: dict[str, Any]) -> int:
    """What the transfer moved, over all groups."""
    return sum(group["pulled_bytes"] for group in generation["transfer"]["groups"])


def add_eos(directory: Path, token_id: int) -> None:
    """Let one more token end requests, by the checkpoint's generation defaults."""
    file = directory / "generation_config.json"
    config = json.loads(file.read_text())
    config["eos_token_id"] = [*config["eos_token_id"], token_id]
    file.write_text(json.dumps(config))
