"""What a request, or a deployment for all of them, wants of its times."""

from dataclasses import dataclass, replace


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
        """The same, but what a request says of its own; None: nothing."""
        given = {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "sheds": sheds}
        if not any(one is not None for one in given.values()):
            return self
        return replace(self, **{name: one for name, one in given.items() if one is not None})  # type: ignore[arg-type]


NO_SLO = Slo()
