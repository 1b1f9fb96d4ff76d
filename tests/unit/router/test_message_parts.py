"""Calls and reasoning in what models write, however it is cut into pieces."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.errors import ConfigError
from disagg.router.message_parts import formats
from disagg.router.message_parts.json_text import JsonObject
from disagg.router.message_parts.message_syntax import MessageSyntax
from disagg.router.message_parts.parts import (
    CallArguments,
    CallStart,
    Content,
    Reasoning,
    merged,
)
from tests.drawn_tables import check_drawn
from tests.unit.router.message_examples import ARGS, EXAMPLES, HEAD, SCHEMAS, TEMPLATES, B, C, S

ROOT = Path(__file__).parents[3]
IDS = [f"{example.model_type}-{example.what}" for example in EXAMPLES]


def syntax_of(model_type, **settings):
    return MessageSyntax(model_type, TEMPLATES[model_type], lambda _: None, **settings)


def parser_of(model_type, prompt_end=""):
    return syntax_of(model_type).parser(prompt_end, SCHEMAS)


def read(parser, pieces):
    parts = [part for piece in pieces for part in parser.push(piece)]
    return merged(parts + parser.finish())


def message_of(parts):
    """Content, (name, text of arguments) of each call, reasoning."""
    names = [part.name for part in parts if isinstance(part, CallStart)]
    texts = dict.fromkeys(range(len(names)), "")
    for part in parts:
        if isinstance(part, CallArguments):
            texts[part.index] += part.text
    content, reasoning = (
        "".join(part.text for part in parts if isinstance(part, kind))
        for kind in (Content, Reasoning)
    )
    return content, list(zip(names, texts.values(), strict=True)), reasoning


@pytest.mark.parametrize("example", EXAMPLES, ids=IDS)
def test_an_example_is_the_message_it_is(example):
    parser = parser_of(example.model_type, example.prompt_end)
    content, calls, reasoning = message_of(read(parser, [example.text]))
    assert [(name, json.loads(text)) for name, text in calls] == example.calls
    assert (content, reasoning) == (example.content, example.reasoning)
    # Control: where no tool can be called, none is, and nothing of the text is lost.
    parser = syntax_of(example.model_type).parser(example.prompt_end, {})
    parts = read(parser, [example.text]) if parser else [Content(example.text)]
    content, calls, _ = message_of(parts)
    assert calls == []
    if example.calls and not example.reasoning and example.model_type != "gpt_oss":
        assert content == example.text


FRAGMENTS = [
    *(example.text for example in EXAMPLES),
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<|channel|>",
    "<|start|>assistant",
    "<|message|>",
    "[",
    "{",
    '"',
    "```",
    "get_weather(",
    "<function=get_weather>",
    "x",
    "\n",
    ARGS,
    HEAD,
    B + C,
    S,
]


@settings(max_examples=300, deadline=None)
@given(
    model_type=st.sampled_from(sorted(TEMPLATES)),
    prompt_end=st.sampled_from(["", "<think>\n"]),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=4),
    cuts=st.lists(st.integers(0, 400), max_size=30),
)
def test_where_a_text_is_cut_makes_no_difference(model_type, prompt_end, fragments, cuts):
    text = "".join(fragments)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    whole = read(parser_of(model_type, prompt_end), [text])
    assert read(parser_of(model_type, prompt_end), pieces) == whole
    assert read(parser_of(model_type, prompt_end), text) == whole
    for name, arguments in message_of(whole)[1]:
        assert name in SCHEMAS
        # As far as they go they are JSON: nothing but their end may be missing.
        follow = JsonObject()
        assert all(follow.push(char) for char in arguments)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from("ab<>/{}[]()=`|\n tol_cahink\"'"), max_size=60))
def test_text_without_calls_is_passed_through(text):
    for model_type in ("deepseek_v3", "gemma3_text", "llama4_text", "nemotron_h"):
        if "</think>" in text or "<think>" in text:
            continue
        content, calls, reasoning = message_of(read(parser_of(model_type), [text]))
        assert (content, calls, reasoning) == (text, [], "")


def test_a_call_is_shown_while_it_is_written():
    """Arguments come as they are written, not at their end."""
    parser = parser_of("qwen3_next")
    assert parser.push("Hi <tool") == [Content("Hi ")]
    assert parser.push('_call>{"name": "get_weather", "arg') == []
    assert parser.push('uments": {"ci') == [
        CallStart(0, "get_weather"),
        CallArguments(0, '{"ci'),
    ]
    assert parser.push('ty": "Par') == [CallArguments(0, 'ty": "Par')]
    assert parser.push('is"}}</tool_call>') == [CallArguments(0, 'is"}')]
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("model_type", "text", "arguments", "content"),
    [
        ("qwen3_next", '<tool_call>{"name":"time.now","arguments":{"a":1', '{"a":1', ""),
        ("qwen3_next", '<tool_call>{"name":"time.now","arguments":{"a":x}}', '{"a":', "x}}"),
        ("llama4_text", "[time.now(a=1, b='x", '{"a": 1', " b='x"),
        ("gpt_oss", "<|channel|>commentary to=functions.time.now<|message|>{]", "{", "]"),
    ],
)
def test_a_call_that_breaks_off_keeps_what_it_had(model_type, text, arguments, content):
    found = message_of(read(parser_of(model_type), [text]))
    assert found == (content, [("time.now", arguments)], "")


def test_reasoning_can_be_switched_off_and_on():
    text = "<think>a</think>b"
    assert syntax_of("qwen3_next").parser("", {}).push(text)[0] == Reasoning("a")
    assert syntax_of("qwen3_next", reasoning_parser="none").parser("", {}) is None
    # A template that knows nothing of it: a model that does not reason.
    plain = MessageSyntax("qwen3_next", "{{ tools }}", lambda _: None)
    assert plain.parser("", {}) is None
    forced = MessageSyntax("unknown", "", lambda _: None, reasoning_parser="think")
    parser = forced.parser("", {})
    assert parser is not None
    assert parser.push(text)[0] == Reasoning("a")
    assert syntax_of("qwen3_next", tool_call_parser="none").tools == ""
    assert syntax_of("qwen3_next", tool_call_parser="llama").tools == "llama"
    with pytest.raises(ConfigError, match="does not go with"):
        syntax_of("qwen3_next", tool_call_parser="harmony")


def families_table():
    """What docs/api.md says of families: all of it from the code and from examples that pass."""
    rows = [
        "| family | `model_type` | calls | forms that are read | reasoning |",
        "|---|---|---|---|---|",
    ]
    for family in formats.FAMILIES:
        own = [e for e in EXAMPLES if formats.family_of(e.model_type) is family]
        forms = sorted({e.form for e in own if e.form})
        assert forms, family.name
        assert all(e.calls for e in own if e.form)
        assert any(e.reasoning for e in own) == bool(family.reasoning), family.name
        types = ", ".join(f"`{name}`" for name in family.model_types)
        reasoning = f"`{family.reasoning}`" if family.reasoning else "-"
        rows.append(
            f"| {family.name} | {types} | `{family.tools}` | {'; '.join(forms)} | {reasoning} |"
        )
    return "\n".join(rows) + "\n"


def test_the_documents_table_is_this_one():
    check_drawn(ROOT / "docs/api.md", "families", families_table())


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


def is_object(text):
    follow = JsonObject()
    for index, char in enumerate(text):
        if not follow.push(char):
            return False
        if follow.depth == 0:
            return index == len(text) - 1
    return False


@settings(max_examples=300, deadline=None)
@given(value=st.dictionaries(st.text(max_size=3), JSON_VALUES), data=st.data())
def test_json_is_what_the_library_says_it_is(value, data):
    text = json.dumps(
        value, ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.sampled_from([None, 1]))
    )
    assert is_object(text)
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from('{}[]:,"\\0e-.+tn \n\x01x'))
    for changed in (text[:at] + other + text[at + 1 :], text[:at] + text[at + 1 :]):
        try:
            json.loads(changed)
            valid = changed.startswith("{") and changed.endswith("}")
        except ValueError:
            valid = False
        assert is_object(changed) == valid, changed
