"""Grammars under which an answer is calls of tools and nothing else, as its family writes them."""

from collections.abc import Mapping
from typing import Any, Protocol

from disagg.grammar.marked_grammars import MarkedGrammar
from disagg.router.message_parts import bare_calls, deepseek_calls, harmony, tagged_calls
from disagg.router.message_parts.call_parser import Schemas
from disagg.router.message_parts.json_text import to_json

CALLS_MAX = 16
"""In one answer whose calls are forced."""
NO_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
"""What OpenAI takes a tool without parameters for."""


class ForcedCalls(Protocol):
    """One or several calls of given tools as an expression of a grammar."""

    def __call__(self, to: MarkedGrammar, schemas: Schemas, *, several: bool) -> str:
        """The expression; with ``several`` of up to `CALLS_MAX` calls."""


def hermes(to: MarkedGrammar, schemas: Schemas, *, several: bool) -> str:
    """Tagged JSON objects, one per tag."""
    begin, end = to.mark(tagged_calls.CALL), to.mark(tagged_calls.CALL_END)
    call = f'{begin} "\\n" {_objects(to, schemas, "arguments")} "\\n" {end}'
    return _listed(to, call, "\n", several)


def hermes_list(to: MarkedGrammar, schemas: Schemas, *, several: bool) -> str:
    """One tag with a list of JSON objects."""
    begin, end = to.mark(tagged_calls.LIST), to.mark(tagged_calls.LIST_END)
    calls = _listed(to, _objects(to, schemas, "arguments"), ", ", several)
    return f'{begin} "[" {calls} "]" {end}'


def llama(to: MarkedGrammar, schemas: Schemas, *, several: bool) -> str:
    """JSON objects, nothing around them."""
    return _listed(to, _objects(to, schemas, "parameters"), "; ", several)


def gemma(to: MarkedGrammar, schemas: Schemas, *, several: bool) -> str:
    """A fenced block with a JSON object, or with a list of them."""
    call = _objects(to, schemas, "parameters")
    calls = f'"[" {_listed(to, call, ", ", several)} "]"' if several else call
    fence = bare_calls.FENCES[0] + "\n", "\n" + bare_calls.FENCE_END
    return f"{to.text(fence[0])} {calls} {to.text(fence[1])}"


def deepseek(to: MarkedGrammar, schemas: Schemas, *, several: bool) -> str:
    """A block of names and JSON (V3.1)."""
    return _deepseek(to, schemas, several, "{name}", "", "", "")


def deepseek_fenced(to: MarkedGrammar, schemas: Schemas, *, several: bool) -> str:
    """A block of names and fenced JSON (V3, R1)."""
    return _deepseek(to, schemas, several, "function", "{name}\n```json\n", "\n```", "\n")


def harmony_message(to: MarkedGrammar, schemas: Schemas, *, several: bool) -> str:
    """One message to a tool; gpt-oss ends its turn with it."""
    messages = [
        f"{to.text(f'commentary to={harmony.FUNCTIONS}{name} ')} {to.mark(harmony.CONSTRAIN)} "
        f'"json" {to.mark(harmony.MESSAGE)} {_arguments(to, schema)}'
        for name, schema in schemas.items()
    ]
    return f"{to.mark(harmony.CHANNEL)} {_either(messages)}"


def _deepseek(
    to: MarkedGrammar, schemas: Schemas, several: bool, head: str, before: str, after: str, gap: str
) -> str:
    begin, middle, end = map(
        to.mark, (deepseek_calls.CALL, deepseek_calls.SEPARATOR, deepseek_calls.CALL_END)
    )
    calls = [
        " ".join(
            (
                to.text(head.format(name=name)),
                middle,
                *([to.text(before.format(name=name))] if before else ()),
                _arguments(to, schema),
                *([to.text(after)] if after else ()),
            )
        )
        for name, schema in schemas.items()
    ]
    listed = _listed(to, f"{begin} {_either(calls)} {end}", gap, several)
    return f"{to.mark(deepseek_calls.BLOCK)} {listed} {to.mark(deepseek_calls.BLOCK_END)}"


def _objects(to: MarkedGrammar, schemas: Schemas, key: str) -> str:
    """A JSON object per tool: its name, its arguments."""
    heads = {name: f'{{"name": {to_json(name)}, "{key}": ' for name in schemas}
    return _either(
        [
            f"{to.text(heads[name])} {_arguments(to, schema)} {to.text('}')}"
            for name, schema in schemas.items()
        ]
    )


def _arguments(to: MarkedGrammar, schema: Mapping[str, Any]) -> str:
    return to.json(dict(schema or NO_ARGUMENTS))


def _either(expressions: list[str]) -> str:
    return f"({' | '.join(expressions)})"


def _listed(to: MarkedGrammar, call: str, separator: str, several: bool) -> str:
    if not several:
        return call
    between = f"{to.text(separator)} " if separator else ""
    return f"{call} ({between}{call}){{0,{CALLS_MAX - 1}}}"
