"""What a request, or a deployment for all of them, wants of its times."""

from dataclasses import dataclass, replace

from disagg.errors import RequestError


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds that plans should keep; 0 stands for none."""

    ttft_ms: int = 0
    """From the request's arrival to its first token."""
    tpot_ms: float = 0.0
    """Mean time per token after it."""
    sheds: bool = False
    """A request for which no plan keeps ``ttft_ms`` is refused, and may come again later."""

    def is_missed(self, ttft_ms: float) -> bool:
        """Whether a first token after so long is too late for a request that is shed then."""
        return self.sheds and 0 < self.ttft_ms < ttft_ms

    def overridden(self, ttft_ms: int | None, tpot_ms: float | None, sheds: bool | None) -> "Slo":
        """The same, but what a request says of its own; None: nothing.

        Raises:
            RequestError: it wants to be shed, and there is no bound for its first token.
        """
        given = {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "sheds": sheds}
        if not any(one is not None for one in given.values()):
            return self
        found = replace(self, **{name: one for name, one in given.items() if one is not None})  # type: ignore[arg-type]
        if sheds and not found.ttft_ms:
            raise RequestError(
                "needs a bound: give disagg.ttft_ms too, as this router has no router.slo_ttft_ms",
                param="disagg.shed",
            )
        return found


NO_SLO = Slo()

SURELY_KEPT, SURELY_MISSED = 0.8, 1.2
"""Shares of a bound up to which it is kept and from which it is missed, as far as estimates are
right; in between a miss counts in part, or a millisecond would decide about all of it."""


def missed(share: float) -> float:
    """What a bound counts as missed, 0 to 1, that is expected to be used to such a share."""
    return part(share, SURELY_KEPT, SURELY_MISSED)


def part(share: float, low: float, high: float) -> float:
    """How far a share is from the lower to the higher one, 0 to 1."""
    return min(1.0, max(0.0, (share - low) / (high - low)))
