"""The ``usage`` of an answer."""

from typing import Any


def token_counts(num_prompt: int, num_completion: int) -> dict[str, int]:
    """Tokens so far, as each chunk has them with ``continuous_usage_stats``."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }


def usage_body(num_prompt: int, num_completion: int, num_cached: int) -> dict[str, Any]:
    """Token counts of a whole answer."""
    details = {"prompt_tokens_details": {"cached_tokens": num_cached}}
    return token_counts(num_prompt, num_completion) | details
