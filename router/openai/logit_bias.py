"""The ``logit_bias`` of a request."""

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

from disagg.router.generation_request import LOGIT_BIAS_MAX, LOGIT_BIAS_TOKENS_MAX

TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    if len(value) > LOGIT_BIAS_TOKENS_MAX:
        raise ValueError(f"at most {LOGIT_BIAS_TOKENS_MAX} tokens")
    biases: dict[int, float] = {}
    for token, bias in value.items():
        # Exactly the digits: int() takes signs, blanks and underscores too.
        if not TOKEN_ID.fullmatch(token):
            raise ValueError("its keys must be token ids")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise ValueError("its values must be numbers")
        if not -LOGIT_BIAS_MAX <= bias <= LOGIT_BIAS_MAX:
            raise ValueError(
                f"its values must be between {-LOGIT_BIAS_MAX:g} and {LOGIT_BIAS_MAX:g}"
            )
        biases[int(token)] = float(bias)
    return tuple(sorted(biases.items()))


Bias = Annotated[float, Field(ge=-LOGIT_BIAS_MAX, le=LOGIT_BIAS_MAX)]
Token = Annotated[str, Field(pattern=f"^({TOKEN_ID.pattern})$")]
LogitBiasGiven = Annotated[dict[Token, Bias], Field(max_length=LOGIT_BIAS_TOKENS_MAX)] | None
"""As clients write it."""
LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    BeforeValidator(_logit_bias, json_schema_input_type=LogitBiasGiven),
]
"""(token id, bias), by token id."""
