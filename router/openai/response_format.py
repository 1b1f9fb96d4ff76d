"""The ``response_format`` of a request."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from disagg.errors import RequestError
from disagg.grammar.json_grammars import ANY_OBJECT, json_grammar
from disagg.messages.sampling import GRAMMAR_BYTES_MAX
from disagg.router.openai.body import Strict, exceeds


def _short(value: object) -> object:
    if exceeds(value, GRAMMAR_BYTES_MAX, with_text=True):  # before it is written out
        raise ValueError(f"at most {GRAMMAR_BYTES_MAX} bytes")
    return value


class JsonSchema(Strict):
    """The ``json_schema`` of a response format; a schema is followed with or without ``strict``."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = Field(default=None, repr=False)
    schema_: Annotated[dict[str, Any], BeforeValidator(_short)] = Field(alias="schema", repr=False)
    strict: bool | None = None


class ResponseFormat(Strict):
    """What an answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def schema_of_content(self) -> dict[str, Any] | None:
        """What content is an instance of; None: of nothing.

        Raises:
            RequestError: a schema is lacking, or there is one that would not count.
        """
        if (self.type == "json_schema") != (self.json_schema is not None):
            what = "goes" if self.json_schema else "is required"
            raise RequestError(f"{what} with type json_schema", param="response_format.json_schema")
        if self.json_schema is not None:
            return self.json_schema.schema_
        return ANY_OBJECT if self.type == "json_object" else None

    def grammar(self) -> str:
        """See ``SamplingParams.grammar``.

        Raises:
            RequestError: see `schema_of_content`.
        """
        schema = self.schema_of_content()
        return "" if schema is None else json_grammar(schema)
