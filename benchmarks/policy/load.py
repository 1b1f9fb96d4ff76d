"""The client: a trace's requests at their moments, and when their tokens came."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType

from benchmarks.policy.figures import Slo
from benchmarks.policy.traces import Request
from tests.process.harness import MODEL

ANSWER_S = 300.0
LINE_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's answer; moments in seconds of this machine's monotonic clock.

    Attributes:
        sent_s: when it was due, or, of a later turn, when the answer before was whole, if that was
            later.
        asked_s: when the client did ask: its timers and its JSON took until then.
        tokens: ids.
    """

    request_id: str
    num_prompt_tokens: int
    sent_s: float
    asked_s: float
    first_s: float
    last_s: float
    tokens: tuple[int, ...]

    @property
    def ttft_ms(self) -> float:
        """To its first token."""
        return 1e3 * (self.first_s - self.sent_s)

    @property
    def tpot_ms(self) -> float:
        """Mean between its tokens."""
        return 1e3 * (self.last_s - self.first_s) / max(1, len(self.tokens) - 1)


async def play(
    url: str, trace: Sequence[Request], name: str, slos: Mapping[str, Slo] = MappingProxyType({})
) -> list[Answer]:
    """Ask a whole trace, and wait for all its answers; raises what a request raises.

    Args:
        url: of the router.
        trace: of `make_trace`.
        name: begins the requests' ids.
        slos: by kind, said with each request; none where it is missing.
    """
    prompts: dict[int, list[int]] = {}
    ended: dict[int, asyncio.Task[Answer]] = {}
    started_s = time.monotonic() + 0.05

    async def answer(number: int, one: Request) -> Answer:
        due_s = started_s + one.arrival_s
        await asyncio.sleep(due_s - time.monotonic())
        prompt = list(one.tokens)
        if one.follows is not None:
            before = await ended[one.follows]
            prompt = [*prompts[one.follows], *before.tokens, *prompt]
            due_s = max(due_s, before.last_s)
        prompts[number] = prompt
        slo = slos.get(one.kind)
        return await ask(url, prompt, one.num_output_tokens, f"{name}-{number}", due_s, slo)

    async with asyncio.timeout(ANSWER_S), asyncio.TaskGroup() as group:
        for number, one in enumerate(trace):
            ended[number] = group.create_task(answer(number, one))
    return [ended[number].result() for number in range(len(trace))]


async def ask(
    url: str,
    prompt: Sequence[int],
    num_output_tokens: int,
    request_id: str,
    due_s: float | None = None,
    slo: Slo | None = None,
) -> Answer:
    """Ask one request and read its stream.

    Args:
        url: of the router.
        prompt: token ids.
        num_output_tokens: of its answer.
        request_id: that no other one has.
        due_s: from when on its time counts; now, if not given.
        slo: said to the router.

    Raises:
        RuntimeError: the answer is an error, or lacks tokens.
    """
    wanted = (
        {} if slo is None else {"disagg": {"ttft_ms": ceil(slo.ttft_ms), "tpot_ms": slo.tpot_ms}}
    )
    body = json.dumps(
        {
            **wanted,
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": num_output_tokens,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "stream": True,
            "temperature": 0.0,
        }
    ).encode()
    due_s = time.monotonic() if due_s is None else due_s
    host, _, port = url.removeprefix("http://").partition(":")
    asked_s = time.monotonic()
    reader, writer = await asyncio.open_connection(host, int(port), limit=LINE_BYTES_MAX)
    try:
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
            f"content-type: application/json\r\nx-request-id: {request_id}\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError((status + await reader.read()).decode())
        first_s = last_s = 0.0
        words: list[str] = []
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(line.decode())
            if text := chunk["choices"][0]["text"]:
                last_s = time.monotonic()
                first_s = first_s or last_s
                words += text.split()
    finally:
        writer.close()
    if len(words) != num_output_tokens:
        raise RuntimeError(f"{request_id}: {len(words)} tokens instead of {num_output_tokens}")
    tokens = tuple(int(word.removeprefix("t")) for word in words)
    return Answer(request_id, len(prompt), due_s, asked_s, first_s, last_s, tokens)
