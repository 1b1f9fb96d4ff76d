"""The body of ``PUT /v1/disagg/drain``."""

from typing import Annotated

from pydantic import Field
from pydantic_core import from_json

from disagg.errors import RequestError
from disagg.router.openai.body import Strict, validate

TIMEOUT_MS_MAX = 24 * 3_600_000


class DrainBody(Strict):
    """Which worker, or the workers of which host, shall be free of work."""

    name: Annotated[str, Field(min_length=1)]
    """A worker's id, or the host of workers' addresses."""
    timeout_ms: Annotated[int, Field(ge=0, le=TIMEOUT_MS_MAX)] = 30_000
    """After which nothing goes on there any more; in its last quarter what decodes moves."""
    undo: bool = False
    """The workers of a host take work again."""


def parse_drain_body(body: bytes) -> DrainBody:
    """A body.

    Raises:
        RequestError: naming the field.
    """
    try:
        given = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"is no JSON: {error}", param="body") from error
    if not isinstance(given, dict):
        raise RequestError('must be {"name": WORKER or HOST, ...}', param="body")
    return validate(DrainBody, given)
