"""The ``tools`` and the ``tool_choice`` of a request."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from disagg.errors import RequestError
from disagg.router.openai.body import ITEMS_MAX, Strict, exceeds

TOOLS_MAX = 128
NAME = r"^[a-zA-Z0-9_.-]{1,64}$"


class Function(Strict):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = Field(default=None, repr=False)
    parameters: dict[str, Any] | None = Field(default=None, repr=False)
    strict: bool | None = None
    """Forced calls follow the schema with or without it; others are as the model writes them."""


class Tool(Strict):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    """Which function a choice names."""

    name: str


class NamedTool(Strict):
    """A choice of one function."""

    type: Literal["function"]
    function: FunctionName


def _few_values(value: object) -> object:
    if exceeds(value, ITEMS_MAX):  # what is made of them, all streams wait for
        raise ValueError(f"at most {ITEMS_MAX} values")
    return value


FEW = BeforeValidator(_few_values)
Tools = Annotated[list[Tool], FEW, Field(max_length=TOOLS_MAX)]
CHOICES = ("none", "auto", "required")


def choice_of(value: object) -> object:
    """Refuse what is no choice in one message, not in one per form."""
    is_named = isinstance(value, dict) and value.get("type") == "function"
    if value is None or (isinstance(value, str) and value in CHOICES) or is_named:
        return value
    raise ValueError(f"must be {', '.join(CHOICES)} or name a function")


ChoiceGiven = Literal["none", "auto", "required"] | NamedTool | None
ToolChoice = Annotated[ChoiceGiven, BeforeValidator(choice_of, json_schema_input_type=ChoiceGiven)]


def for_template(tools: list[Tool]) -> tuple[dict[str, Any], ...]:
    """Tools as chat templates know them."""
    return tuple(
        {
            "type": "function",
            "function": tool.function.model_dump(exclude_none=True, exclude={"strict"}),
        }
        for tool in tools
    )


def callable_schemas(
    tools: list[Tool], choice: ToolChoice, choice_field: str = "tool_choice"
) -> dict[str, dict[str, Any]]:
    """The tools that may be called: name to the schema of its arguments.

    Raises:
        RequestError: two tools have one name, or the choice has no tool.
    """
    schemas: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        if tool.function.name in schemas:
            raise RequestError("is there twice", param=f"tools[{index}].function.name")
        schemas[tool.function.name] = tool.function.parameters or {}
    if choice == "none":
        return {}
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in schemas:
            raise RequestError("names none of the tools", param=f"{choice_field}.function.name")
        return {name: schemas[name]}
    if choice is not None and not schemas:
        raise RequestError("needs tools", param=choice_field)
    return schemas
