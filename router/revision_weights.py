"""The body of ``PUT /v1/disagg/revisions``."""

from pydantic_core import from_json

from disagg.errors import ConfigError, RequestError
from disagg.router.openai.body import Strict, validate
from disagg.routing.revisions import check_weights


class RevisionWeights(Strict):
    """How new requests are shared, in place of what was set before."""

    weights: dict[str, float]
    """By the name of a revision; those that are not named get nothing."""


def parse_revision_weights_body(body: bytes) -> dict[str, float]:
    """The weights of a body.

    Raises:
        RequestError: naming the field.
    """
    try:
        given = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"is no JSON: {error}", param="body") from error
    if not isinstance(given, dict):
        raise RequestError('must be {"weights": {NAME: WEIGHT, ...}}', param="body")
    try:
        return check_weights(validate(RevisionWeights, given).weights)
    except ConfigError as error:
        raise RequestError(error.message, param="weights") from error
