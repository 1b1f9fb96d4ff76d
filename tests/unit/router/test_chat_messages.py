"""Messages as chat templates know them, beside what pydantic makes of the same message."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.router.openai.chat_message import Message

texts = st.sampled_from(["", "a", "name", "two\nlines", "\u00fc\U0001f600"])
maybe = st.none() | texts
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
calls = st.fixed_dictionaries(
    {
        "id": texts,
        "function": st.fixed_dictionaries(
            {"name": texts, "arguments": st.dictionaries(texts, values, max_size=3).map(json.dumps)}
        ),
    },
    optional={"type": st.just("function"), "index": st.none() | st.integers(0, 9)},
)
contents = maybe | st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": texts}), min_size=1, max_size=2
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"])},
    optional={
        "content": contents,
        "name": maybe,
        "tool_calls": st.none() | st.lists(calls, min_size=1, max_size=2),
        "tool_call_id": maybe,
        "reasoning_content": maybe,
    },
)


@settings(deadline=None)
@given(messages)
def test_a_template_is_given_what_pydantic_would_show(fields: dict[str, Any]) -> None:
    message = Message.model_validate(fields)
    shown = message.model_dump(exclude_none=True) | {"content": message.content}
    if message.reasoning_content and not (message.tool_calls and message.content):
        shown["thinking"] = message.reasoning_content
    assert message.for_template() == shown


def test_every_field_of_a_message_is_in_the_property() -> None:
    """A new one would be lacking in templates, and in the property above."""
    shown = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}
    assert set(Message.model_fields) == shown
