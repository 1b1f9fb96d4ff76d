"""Errors in OpenAI's form."""

from typing import Any

from disagg.errors import DisaggError


def error_body(error: DisaggError) -> dict[str, Any]:
    """The OpenAI error schema; the message starts with the field at fault."""
    message = f"{error.param}: {error.message}" if error.param else error.message
    return {
        "error": {
            "message": message,
            "type": error.type,
            "param": error.param or None,
            "code": error.code,
        }
    }
