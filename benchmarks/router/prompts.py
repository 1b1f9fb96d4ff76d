"""From a request's arrival to its submits, by part: ``python -m benchmarks.router.prompts``.

CPU milliseconds of the production objects, one after the other in this process, for chats of about
100, 8,192 and 65,536 tokens: the body's JSON and fields to a request; the chat template; the
tokenizer; block hashes; the plan of a hand-over between an idle prefill and an idle decode worker
that hold nothing of the prompt; both submits encoded. Every sample has another text. HTTP, gRPC and
task switches are none of these parts (`benchmarks.router`). In the router what is longer than 2,000
characters is parsed and tokenised in a thread. No peer does as much, hence no target.
``--quick``: fewer samples.
"""

import argparse
import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.router.checkpoint import make_checkpoint
from benchmarks.router.environment import MODEL
from benchmarks.router.grpc_workers import InstantWorker, info_of
from benchmarks.transfer.figures import MS, figure
from disagg.messages.sampling import SamplingParams
from disagg.messages.submit import Submit
from disagg.router.chat import Chat
from disagg.router.chat_template import ChatTemplate
from disagg.router.new_core import new_core
from disagg.router.openai.chat_request import parse_chat
from disagg.router.options import RouterOptions
from disagg.router.tokenizer import Tokenizer
from disagg.router.tokenizer_loading import load_tokenizer
from disagg.routing.actions import NewRequest, ToWorker
from disagg.routing.core import RouterCore
from disagg.testing.scripted_worker import HASH_KEY, READY
from disagg.wire.session_batches import batched
from disagg.wire.session_encoder import SessionEncoder

NUM_TOKENS = {100: 200, 8_192: 30, 65_536: 8}
"""Samples by the length of the prompt."""
QUICK_SHARE = 4
NOW_MS = 1_000_000
_Result = TypeVar("_Result")


class Samples:
    """CPU seconds of each part, sample by sample."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = defaultdict(list)

    def of(self, part: str, work: Callable[[], _Result]) -> _Result:
        """Do a part's work, and note what it takes."""
        began_s = time.process_time()
        result = work()
        self.parts[part].append(time.process_time() - began_s)
        return result


def idle_fleet(checkpoint: Path) -> RouterCore:
    """A router's core with a prefill and a decode worker."""
    core = new_core(RouterOptions(str(checkpoint), MODEL, hash_key=HASH_KEY), "router", print)
    for role in ("prefill", "decode"):
        info = info_of(InstantWorker(role, 0.0), "127.0.0.1:1")
        core.register(NOW_MS, info)
        core.session_up(NOW_MS, info.incarnation)
        core.from_worker(NOW_MS, info.incarnation, replace(READY, num_blocks_free=100_000))
    return core


def body_of(tokenizer: Tokenizer, num_tokens: int, number: int) -> bytes:
    """A chat request with a text of about so many tokens."""
    chance = random.Random(number)
    letters = "etaoinshrdlucmfwypvbgk"
    words = ("".join(chance.choices(letters, k=chance.randint(2, 9))) for _ in range(num_tokens))
    text = tokenizer.decode(tokenizer.encode(" ".join(words))[:num_tokens])
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 2}).encode()


def sample(
    taken: Samples, body: bytes, template: ChatTemplate, tokenizer: Tokenizer, core: RouterCore
) -> int:
    """One request, part by part; returns its tokens."""
    (request,) = taken.of("JSON and fields", lambda: parse_chat(body).generation_requests())
    chat = request.prompt
    assert isinstance(chat, Chat)
    text = taken.of("template", lambda: template.render(chat))
    token_ids = taken.of("tokenise", lambda: tokenizer.encode(text, add_special_tokens=False))
    revision = core.assign("request")
    hashes = taken.of("hash", lambda: revision.hashes(token_ids, b""))
    sampling = SamplingParams(max_tokens=2, num_prompt_tokens=len(token_ids))
    new = NewRequest("request", token_ids, tuple(hashes), b"", sampling, revision=revision)
    actions = taken.of("plan", lambda: core.generate(NOW_MS, new))
    submits = [action.message for action in actions if isinstance(action, ToWorker)]
    assert [type(one) for one in submits] == [Submit, Submit], "it was not handed over"
    encoder = SessionEncoder()
    taken.of(
        "submits encoded",
        lambda: [
            wire.SerializeToString() for one in submits for wire in batched([encoder.encode(one)])
        ],
    )
    core.cancel(NOW_MS, "request", "measured")
    return len(token_ids)


def main() -> None:
    """Print a line per length and part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a quarter of the samples")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = make_checkpoint(Path(temporary) / "model")
        template = ChatTemplate(load_tokenizer(checkpoint))
        tokenizer, core = Tokenizer(checkpoint), idle_fleet(checkpoint)
        for num_tokens, num_samples in NUM_TOKENS.items():
            taken, num = Samples(), 0
            for number in range(-1, num_samples // (QUICK_SHARE if quick else 1)):
                num = sample(
                    taken, body_of(tokenizer, num_tokens, number), template, tokenizer, core
                )
                if number < 0:
                    taken = Samples()  # it was the first of its kind
            show(taken, num)


def show(taken: Samples, num_tokens: int) -> None:
    """The parts of one length, and all of them."""
    parts: dict[str, list[float]] = {
        **taken.parts,
        "all parts": [sum(each) for each in zip(*taken.parts.values(), strict=True)],
    }
    more: Any = {"unit": "ms of CPU", "target": None, "peer_name": None}
    for part, seconds in parts.items():
        name = f"router/arrival to submit, {num_tokens} tokens, {part}"
        figure(name, [MS * one for one in seconds], None, note="one process", **more)


if __name__ == "__main__":
    main()
