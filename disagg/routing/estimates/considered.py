"""A plan that was weighed, in plain types, for records."""

from disagg.messages.frozen import dataclass
from disagg.routing.estimates.estimate import Estimate


@dataclass(frozen=True, slots=True)
class Considered:
    """A plan that was weighed, as it is shown afterwards: workers by id, "" for none."""

    prefill: str
    decode: str
    pull: str
    found_tokens: int
    """Tokens of the prompt that need not be computed."""
    estimate: Estimate | None
    """None: too little was measured."""
    num_slos_missed: float
    """Of the request's own and of those whom it disturbs."""
    chosen: bool = False
