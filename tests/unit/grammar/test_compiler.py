"""Schemas become grammars over a checkpoint's tokens, or are refused with the reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disagg.errors import RequestError
from disagg.grammar.compiler import COMPILED_MAX, GrammarCompiler
from disagg.grammar.json_grammars import ANY_OBJECT, json_grammar
from disagg.grammar.marked_grammars import MarkedGrammar
from tests.checkpoints import make_checkpoint

PAIR = {
    "type": "object",
    "properties": {"b": {"enum": ["x", "yes"]}, "a": {"type": "integer"}},
    "required": ["b", "a"],
    "additionalProperties": False,
}


class Grammars:
    """A compiler, and its checkpoint's tokens: there is one for every byte."""

    def __init__(self, directory: Path) -> None:
        self.compiler = GrammarCompiler(directory)
        tokenizer = json.loads((directory / "tokenizer.json").read_text())
        self._ids: dict[str, int] = tokenizer["model"]["vocab"]

    def id_of(self, char: str) -> int:
        return self._ids[{" ": "Ġ", "\n": "Ċ"}.get(char, char)]

    def accept(self, schema: dict[str, Any], text: str) -> bool:
        """Whether a text is a whole answer."""
        state = self.compiler.start(json_grammar(schema))
        ids = [self.id_of(char) for char in text]
        return state.try_consume_tokens(ids) == len(ids) and state.is_accepting()


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return Grammars(make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_layers=1))


@pytest.fixture
def compiler(grammars: Grammars) -> GrammarCompiler:
    return grammars.compiler


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"b":"x","a":12}', True),
        ('{"b": "yes", "a": -3}', True),
        ('{"b":"x","a":12', False),
        ('{"b":"no","a":12}', False),
        ('{"b":"x"}', False),
        ('{"a":12,"b":"x"}', False),  # properties come in the schema's order
        ('{\n"b":"x","a":12}', False),  # in one line
        ('{"b":  "x","a":12}', False),  # or blanks could go on for ever
    ],
)
def test_an_answer_is_an_instance_of_the_schema(
    grammars: Grammars, text: str, expected: bool
) -> None:
    assert grammars.accept(PAIR, text) is expected


def test_what_a_schema_asks_of_the_library_does_not_count(grammars: Grammars) -> None:
    schema = PAIR | {"x-guidance": {"whitespace_flexible": True, "lenient": True}}
    assert not grammars.accept(schema, '{"b":  "x","a":12}')
    assert json_grammar(schema) == json_grammar(PAIR)


def test_any_object(grammars: Grammars) -> None:
    assert grammars.accept(ANY_OBJECT, '{"k": [1, {"z": null}]}')
    assert not grammars.accept(ANY_OBJECT, "[1]")


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "objet"}, "Invalid type: objet"),
        ({"not": {}}, "Unimplemented keys"),
        ({"$ref": "#/nowhere"}, "does not exist"),
        ({"$ref": "http://127.0.0.1:1/x.json"}, "retriev"),  # nothing is fetched
        ({"type": "integer", "minimum": 3, "maximum": 2}, "Unsatisfiable"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"$ref": "#"}, "no answer can match it"),
        ({"allOf": [{"anyOf": [{"minLength": i * j} for j in range(4)]} for i in range(9)]}, ""),
    ],
)
def test_what_cannot_be_a_grammar_is_refused_with_the_reason(
    compiler: GrammarCompiler, schema: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestError) as error:
        compiler.check(json_grammar(schema), "response_format")
    assert error.value.param == "response_format"
    assert reason in error.value.message
    assert "<state>" not in error.value.message


def test_masks_end_with_the_end(grammars: Grammars) -> None:
    """One batch: a bit per token of the model, and nothing behind the checkpoint's tokens."""
    compiler, grammar = grammars.compiler, json_grammar({"enum": [1, 12]})
    first, second = compiler.start(grammar), compiler.start(grammar)
    assert second.consume_token(grammars.id_of("1"))
    bits = np.unpackbits(
        compiler.masks([first, second], 400).view(np.uint8), axis=1, bitorder="little"
    )
    assert bits.shape[1] >= 400
    assert [int(row.sum()) for row in bits] == [1, 2]
    assert not bits[0, compiler.end_id]
    assert bits[1, compiler.end_id]


def test_compiled_grammars_are_few(compiler: GrammarCompiler) -> None:
    grammars = [json_grammar({"enum": [n]}) for n in range(COMPILED_MAX + 1)]
    for grammar in grammars:
        compiler.start(grammar)
    assert not compiler.knows(grammars[0])
    assert all(map(compiler.knows, grammars[1:]))


def test_states_of_one_grammar_are_apart(grammars: Grammars) -> None:
    compiler, grammar = grammars.compiler, json_grammar({"enum": ["x"]})
    first, second = compiler.start(grammar), compiler.start(grammar)
    before = compiler.masks([second], 0)
    assert first.consume_token(grammars.id_of('"'))
    assert np.array_equal(compiler.masks([second], 0), before)
    assert not np.array_equal(compiler.masks([first], 0), before)


@pytest.mark.parametrize("text", [None, "{", '{"model": {}}', '{"model": {"vocab": {}}}'])
def test_a_checkpoint_without_usable_tokens_is_refused_by_name(
    tmp_path: Path, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    compiler = GrammarCompiler(tmp_path)
    with pytest.raises(RequestError, match="tokenizer"):
        compiler.check(json_grammar(ANY_OBJECT), "response_format")


def alone(*numbers: float) -> str:
    return json_grammar({"allOf": [{"type": "number", "multipleOf": one} for one in numbers]})


def marked(*numbers: float) -> str:
    """As arguments of a call that is forced are asked for."""
    to = MarkedGrammar(lambda mark: None)
    return to.grammar(" ".join(to.json({"multipleOf": one}) for one in numbers))


@pytest.mark.parametrize("made", [alone, marked])
@pytest.mark.parametrize(
    "numbers",
    [
        (1_000_000_007,),
        (3.0000001,),
        (1e300,),
        (1e-300,),
        (7919, 7907),
        (0.5, 3e-7),
        (99991,) * 3,
        (0, 7919, 7907),
    ],
)
def test_multiples_that_would_take_the_library_minutes_are_refused(
    compiler: GrammarCompiler, made: Callable[..., str], numbers: tuple[float, ...]
) -> None:
    with pytest.raises(RequestError, match="multipleOf") as caught:
        compiler.check(made(*numbers), "response_format")
    assert caught.value.param == "response_format"


SCHEMA = '{"grammars":[{"json_schema":{"type":"integer",%s}}]}'
IN_TEXT = '{"grammars":[{"lark_grammar":"start: %%json {\\"type\\":\\"integer\\",%s}"}]}'
UNUSED = '"$defs":{"a":{"multipleOf":%s}},"allOf":[{"multipleOf":7919},{"multipleOf":97}]'


@pytest.mark.parametrize(
    "grammar",
    [
        SCHEMA % '"multipleOf" :\n 700001',
        SCHEMA % r'"\u006dultipleOf":700001',
        SCHEMA % (UNUSED % "0"),  # of which the least common multiple is 0
        SCHEMA % (UNUSED % "1e-99999999"),
        SCHEMA % '"multipleOf":1e99999999999999999999',
        IN_TEXT % r"\"multipleOf\"\n: 700001",
        IN_TEXT % r"\u0022multipleOf\u0022:\u0037\u0030\u0030\u0030\u0030\u0031",
        IN_TEXT % r"\"mul\\u0074ipleOf\":700001",
        IN_TEXT % r"\"\u005cu006dultipleOf\":700001",
    ],
)
def test_multiples_are_found_however_they_are_written(
    compiler: GrammarCompiler, grammar: str
) -> None:
    """As clients of gRPC may, who give the grammar itself."""
    with pytest.raises(RequestError, match="sum of all multipleOf"):
        compiler.check(grammar, "sampling.grammar")


def test_a_text_about_multiples_is_none(compiler: GrammarCompiler) -> None:
    for text in ('"multipleOf": 1-2', '"multipleOf": 1.2.3', '"multipleOf": ٣'):
        compiler.check(json_grammar({"description": text, "multipleOf": 3}), "response_format")


@pytest.mark.parametrize("made", [alone, marked])
@pytest.mark.parametrize("numbers", [(86_400,), (0.01, 1000), (1e-7,), (5, 0.5), (2, 3, 5, 7, 11)])
def test_usual_multiples_are_taken(
    compiler: GrammarCompiler, made: Callable[..., str], numbers: tuple[float, ...]
) -> None:
    compiler.check(made(*numbers), "response_format")
