"""What an answer has is freed with it, not when the garbage collector comes: all streams wait then.

It also keeps prompts: of the largest ones, which have megabytes each, several hundred.
"""

import gc
from collections import Counter
from typing import Any

import pytest

from disagg.router.choices import Choices
from disagg.router.client_stream import ClientStream, Unread
from disagg.router.http_cycle import Cycle
from disagg.router.http_exchange import Exchange
from disagg.routing.actions import NewRequest

KINDS = (Choices, ClientStream, Unread, Cycle, Exchange, NewRequest)
NUM_ASKED = 5
COMPLETION = {"model": "tiny", "prompt": [5, 6], "max_tokens": 9}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
RESPONSE = {"model": "tiny", "input": "x", "max_output_tokens": 9}
BODIES = {
    "completion": ("/v1/completions", COMPLETION),
    "completion, streamed": ("/v1/completions", COMPLETION | {"stream": True}),
    "choices": ("/v1/completions", COMPLETION | {"n": 3, "prompt": [[5, 6], [7, 8]]}),
    "stop string": ("/v1/completions", COMPLETION | {"stop": "e"}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat, streamed": ("/v1/chat/completions", CHAT | {"stream": True}),
    "response": ("/v1/responses", RESPONSE),
    "response, streamed": ("/v1/responses", RESPONSE | {"stream": True}),
}


def num_live() -> Counter[str]:
    return Counter(type(one).__name__ for one in gc.get_objects() if type(one) in KINDS)


@pytest.mark.parametrize("what", BODIES)
async def test_an_answer_leaves_nothing_to_collect(house: Any, what: str) -> None:
    path, body = BODIES[what]

    async def ask() -> None:
        answer = await house.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert not len(house.app.dispatcher.open_answers)

    await ask()  # its connection keeps the last exchange
    gc.collect()
    gc.disable()
    try:
        before = num_live()
        for _ in range(NUM_ASKED):
            await ask()
        assert num_live() <= before, num_live() - before
    finally:
        gc.enable()
