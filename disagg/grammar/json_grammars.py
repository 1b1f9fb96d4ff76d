"""JSON schemas as grammars: the text that travels in ``SamplingParams.grammar``."""

import json
from typing import Any

from llguidance import LLMatcher

FORM = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "whitespace_pattern": None,
    "coerce_one_of": False,
    "lenient": False,
}
"""One line with a space or none after a comma and a colon: where blanks were free, a model could
write nothing else. What a schema asks of the library itself (``x-guidance``) does not count."""
ANY_OBJECT: dict[str, Any] = {"type": "object"}


def json_grammar(schema: dict[str, Any]) -> str:
    """The grammar of a schema's instances; properties come in the order that it names them."""
    text = json.dumps(schema | {"x-guidance": FORM}, ensure_ascii=False, separators=(",", ":"))
    return LLMatcher.grammar_from_json_schema(text)
