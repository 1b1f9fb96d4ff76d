"""Whatever a forced grammar lets through is calls that follow their schemas."""

import json
import random

import jsonschema
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from disagg.grammar.compiler import GrammarCompiler
from disagg.router.message_parts import formats, thinking
from disagg.router.message_parts.message_syntax import MessageSyntax
from tests.unit.router.message_examples import SCHEMAS, TEMPLATES
from tests.unit.router.test_message_parts import message_of, read

BOUNDED = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "pattern": "^[a-z]{1,8}$"},
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    "time.now": {},
}
TOKENS_MAX = 3000
MARKS = sorted({mark for form in formats.TOOL_FORMATS.values() for mark in form.marks})
MARKS += [thinking.THINK, thinking.THINK_END]


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "spelt"])
def vocabulary(request, tmp_path_factory):
    """Bytes; the marks are tokens of their own or not."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(BPE(vocab={char: i for i, char in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    if request.param:
        core.add_tokens([AddedToken(mark, special=i % 2 == 0) for i, mark in enumerate(MARKS)])
    folder = tmp_path_factory.mktemp("vocabulary")
    core.save(str(folder / "tokenizer.json"))
    return core, GrammarCompiler(folder)


def answer(core, compiler, grammar, rng):
    """Random tokens that the grammar allows, up to its end."""
    state = compiler.start(grammar)
    ids: list[int] = []
    for _ in range(TOKENS_MAX):
        words = compiler.masks([state], compiler.end_id + 1)[0]
        allowed = [i for i in range(compiler.end_id + 1) if words[i // 32] >> (i % 32) & 1]
        assert allowed
        # What ends is preferred, or free text would go on for ever.
        ends = [i for i in allowed if i >= 256]
        choice = rng.choice(ends if ends and rng.random() < 0.5 else allowed)
        if choice == compiler.end_id:
            return core.decode(ids, skip_special_tokens=False)
        ids.append(choice)
        assert state.consume_token(choice)
    raise AssertionError("it did not end")


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("model_type", sorted(TEMPLATES))
def test_forced_answers_are_calls(vocabulary, model_type, several):
    core, compiler = vocabulary
    # Free text is long where its end is spelt: reasoning is tried where the mark is a token.
    template = TEMPLATES[model_type]
    spelt = core.token_to_id(thinking.THINK) is None
    reasoning = "none" if spelt and model_type != "gpt_oss" else "auto"
    syntax = MessageSyntax(model_type, template, core.token_to_id, reasoning_parser=reasoning)
    if spelt and model_type == "gpt_oss":
        syntax = MessageSyntax(model_type, "{{ tools }}", core.token_to_id)
    grammar = syntax.grammar("", BOUNDED, several=several, json_schema=None)
    rng = random.Random(f"{model_type}/{several}")
    names = set()
    for _ in range(6):
        text = answer(core, compiler, grammar, rng)
        content, calls, _ = message_of(read(syntax.parser("", BOUNDED), [text]))
        assert content == "", text
        assert calls, text
        assert several or len(calls) == 1
        for name, arguments in calls:
            names.add(name)
            jsonschema.validate(json.loads(arguments), BOUNDED[name])
        # Control: under another name nothing of it is a call.
        other = syntax.parser("", {"other": {}})
        assert message_of(read(other, [text]))[1] == []
    assert names <= set(BOUNDED)


def test_reasoning_comes_before_what_is_forced(vocabulary):
    core, compiler = vocabulary
    syntax = MessageSyntax("qwen3_next", TEMPLATES["qwen3_next"], core.token_to_id)
    schema = {"enum": ["yes", "no"]}

    def accepts(prompt_end, text):
        grammar = syntax.grammar(prompt_end, {}, several=True, json_schema=schema)
        state = compiler.start(grammar)
        for token in core.encode(text).ids:
            if not state.consume_token(token):
                return False
        return bool(state.is_accepting())

    thought = 'Hm {"a"}</think>\n\n"yes"'
    assert accepts("<think>\n", thought)
    assert not accepts("<think>\n", '"yes"')
    assert accepts("", "<think>" + thought)
    assert accepts("", '"no"')
    assert not accepts("", thought)
    assert not accepts("<think>\n\n</think>\n\n", "<think>" + thought)
    assert accepts("<think>\n\n</think>\n\n", '"yes"')


def test_json_or_calls(vocabulary):
    """With a response format the model may still choose to call."""
    core, compiler = vocabulary
    syntax = MessageSyntax("llama4_text", TEMPLATES["llama4_text"], core.token_to_id)
    grammar = syntax.grammar("", SCHEMAS, several=False, json_schema={"const": 5})
    for text, fits in (('{"name": "time.now", "parameters": {}}', True), ("5", True), ("6", False)):
        state = compiler.start(grammar)
        taken = [state.consume_token(token) for token in core.encode(text).ids]
        assert (all(taken) and bool(state.is_accepting())) == fits
