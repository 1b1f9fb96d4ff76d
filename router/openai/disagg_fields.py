"""The ``disagg`` object of a request: what no other API has a field for."""

from typing import Annotated, Any

from pydantic import Field

from disagg.router.generation_request import SLO_MS_MAX
from disagg.router.openai.body import Strict


class DisaggFields(Strict):
    """What the request wants of its times and its plan (docs/policies.md)."""

    ttft_ms: Annotated[int, Field(ge=1, le=SLO_MS_MAX)] | None = None
    """From its arrival to its first token."""
    tpot_ms: Annotated[float, Field(ge=0.001, le=SLO_MS_MAX)] | None = None
    """Mean time per token after it."""
    shed: bool | None = None
    """Answer 429 at once where no plan is expected to keep ``ttft_ms``."""
    hand_over: bool | None = None
    """True: as ``prefix_then_load`` plans, so it is handed over where both roles can; false: one
    worker serves it alone. Else as ``router.policy`` has it."""


def fields_of(given: DisaggFields | None) -> dict[str, Any]:
    """The fields of a ``GenerationRequest`` that say so."""
    return {} if given is None else given.model_dump()
