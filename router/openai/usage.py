"""The ``usage`` of an answer."""

from typing import Any


def usage_body(num_prompt: int, num_completion: int, num_cached: int) -> dict[str, Any]:
    """Token counts of one request."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
