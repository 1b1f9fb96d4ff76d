"""A chat as a prompt: its messages, its tools, and what its answer must be."""

import json
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from disagg.messages.frozen import dataclass


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages for the chat template, and the tools that the answer may or must call."""

    messages: tuple[dict[str, Any], ...] = field(repr=False)
    """In OpenAI's form; arguments of calls are objects, as templates expect them."""
    tools: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    """In OpenAI's form, for the template."""
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    """The tools that may be called: name to the JSON schema of its arguments."""
    must_call: bool = False
    several_calls: bool = True
    json_schema: dict[str, Any] | None = field(default=None, repr=False)
    """What content must match, of whatever else the answer has."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Variables for the template."""
    field_of: Mapping[str, str] = field(default_factory=dict)
    """Which field of the request a variable of the template came from, for errors."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts of messages, tools and calls; what the template adds is not counted."""
        calls = [message["tool_calls"] for message in self.messages if "tool_calls" in message]
        described = (json.dumps([self.tools, calls]),) if self.tools or calls else ()
        values = (value for message in self.messages for value in message.values())
        return (*described, *(value for value in values if isinstance(value, str)))
