"""Grammars at every engine, driven by the production scheduler."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from transformers import AutoTokenizer

from disagg.grammar.json_grammars import json_grammar
from disagg.messages.identity import RequestKey
from disagg.messages.sampling import SamplingParams
from disagg.messages.session import EndReason, PartEnded
from disagg.messages.submit import Role, Submit
from disagg.scheduling.actions import ToRouter
from disagg.scheduling.step import Step
from disagg.workers.engines.native.native_engine import NativeEngine
from disagg.workers.engines.protocol import Engine
from tests.checkpoints import EOS_ID, make_checkpoint
from tests.unit.workers.engines.serving import core_over, serve
from tests.vllm.engines import VLLM_SHAPE, make_vllm

STOP = (EOS_ID, 6)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
PLAIN = SamplingParams(60, stop_token_ids=STOP)
GREEDY = replace(PLAIN, grammar=json_grammar(SCHEMA))
SAMPLED = replace(GREEDY, temperature=1.0, top_p=0.9, seed=3, presence_penalty=0.5)
PROMPTS = [
    [(7 * n + 3 * i) % 89 + 7 for i in range(length)] for n, length in enumerate((3, 30, 61))
]


@pytest.fixture(scope="module", params=["torch", pytest.param("vllm", marks=pytest.mark.vllm)])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Callable[[], Engine]]:
    """A checkpoint, and what makes an engine over it."""
    folder = tmp_path_factory.mktemp("model")
    if request.param == "vllm":
        make_checkpoint(folder, "gemma3", window=40, **VLLM_SHAPE)
        return folder, partial(make_vllm, folder, 200)
    make_checkpoint(folder, "gemma3", window=8)
    return folder, partial(NativeEngine, folder, num_blocks=200, block_tokens=4)


def is_instance(directory: Path, tokens: list[int]) -> bool:
    try:
        text: Any = AutoTokenizer.from_pretrained(directory).decode(tokens[:-1])
        jsonschema.validate(json.loads(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return tokens[-1] in STOP


def test_answers_are_instances_wherever_they_go_on(
    made: tuple[Path, Callable[[], Engine]],
) -> None:
    directory, make = made
    engine, other = make(), make()
    for sampling in (GREEDY, SAMPLED):
        whole = [serve(core_over(engine, 64), engine, [one], sampling)[0] for one in PROMPTS]
        assert all(is_instance(directory, tokens) for tokens in whole)
        # In a batch, in chunks, with two steps in flight: most tokens are not known at the launch.
        assert serve(core_over(engine, 7, steps_max=2), engine, PROMPTS, sampling) == whole
        for num_moved in (1, 9):
            so_far = [one + tokens[:num_moved] for one, tokens in zip(PROMPTS, whole, strict=True)]
            got = serve(core_over(other, 64), other, so_far, sampling, num_moved)
            assert got == [tokens[num_moved:] for tokens in whole]
    # Control: without the grammar none is.
    plain = serve(core_over(engine, 64), engine, PROMPTS, PLAIN)
    assert not any(is_instance(directory, tokens) for tokens in plain)


def test_what_nothing_can_follow_ends_alone(made: tuple[Path, Callable[[], Engine]]) -> None:
    """Its neighbour's tokens are what they are without it; and the engine goes on."""
    _, make = made
    engine = make()
    (expected,) = serve(core_over(engine, 64), engine, PROMPTS[:1], SAMPLED)
    core = core_over(engine, 64, steps_max=2)
    bad = replace(GREEDY, grammar=json_grammar({"$ref": "#"}))
    for name, sampling in (("good", SAMPLED), ("bad", bad)):
        own = replace(sampling, num_prompt_tokens=len(PROMPTS[0]))
        submit = Submit(RequestKey(name, 1), Role.LOCAL, tuple(PROMPTS[0]), (), b"", own)
        core.on_router_message(0, submit)
    ended: list[PartEnded] = []
    found: list[int] = []
    launched: list[Step] = []
    while core.sequences or launched:
        while (step := core.next_step(0)[0]) is not None:
            launched.append(step)
        result = engine.run(launched.pop(0))
        assert result.error == ""
        for action in core.on_step_done(0, result):
            match action:
                case ToRouter(PartEnded() as message):
                    ended.append(message)
                case ToRouter(message) if hasattr(message, "outputs"):
                    for output in message.outputs:
                        assert output.key.request_id == "good"
                        found += output.token_ids
    assert [(one.key.request_id, one.reason) for one in ended] == [("bad", EndReason.NO_TOKEN)]
    assert found == expected
    assert serve(core_over(engine, 64), engine, PROMPTS[:1], SAMPLED) == [expected]
