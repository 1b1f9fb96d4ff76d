"""Whether a fleet of workers is complete, or will be, by what its supervisor reports; no I/O."""

from collections.abc import Iterable

from disagg.cluster.fleet_report import FleetReport

_ENDS_MAX_S = 60.0
"""Workers that end before they serve are tried again for so long: it may have been the moment."""
_NAMED_MAX = 8


class FleetHealth:
    """The fault of a fleet, once waiting for it has taken too long.

    A fleet that is not complete is waited for as long as more and more of it serves.

    Args:
        missing_max_s: workers may be missing for so long without one more that serves.
        silence_max_s: the supervisor may say nothing for so long.
        now_s: when its first supervisor was started.

    Attributes:
        is_complete: all workers served when the supervisor was last heard.
        fault: why the fleet is not as it should be; "" when nothing is wrong, or is yet waited for.
    """

    def __init__(self, missing_max_s: float, silence_max_s: float, now_s: float) -> None:
        self._missing_max_s = missing_max_s
        self._silence_max_s = silence_max_s
        self._heard_s = now_s
        self._end = ""
        self._most_serving: int | None = None
        self._progress_s = now_s
        self._ends_since_s: float | None = None
        self.is_complete = False
        self.fault = ""

    def see_end(self, how: str) -> None:
        """The supervisor has ended so; another one is started."""
        self._end = f"; it {how}"

    def see(self, report: FleetReport | None, now_s: float) -> None:
        """Take what the supervisor that runs has written last; None: there is nothing."""
        if report is None:
            silent_s = now_s - self._heard_s
            if silent_s > self._silence_max_s:
                self.fault = (
                    f"the supervisor of the workers says nothing for {silent_s:.0f} s{self._end}"
                )
            return
        self._heard_s, self._end = now_s, ""
        self.is_complete = report.is_complete
        if self.is_complete:
            self._most_serving = self._ends_since_s = None
            self.fault = ""
            return
        if self._most_serving is None or report.num_serving > self._most_serving:
            self._most_serving, self._progress_s = report.num_serving, now_s
            self._ends_since_s = None
        if not report.ended:
            self._ends_since_s = None
        elif self._ends_since_s is None:
            self._ends_since_s = now_s
        missing_s = now_s - self._progress_s
        self.fault = ""
        if missing_s > self._missing_max_s:
            self.fault = f"{_name(report, report.missing)} (for {missing_s:.0f} s)"
        elif self._ends_since_s is not None and now_s - self._ends_since_s > _ENDS_MAX_S:
            self.fault = f"{_name(report, report.ended)} (again and again)"


def _name(report: FleetReport, worker_ids: Iterable[str]) -> str:
    chosen = sorted(worker_ids)
    said = [f"worker {one} does not serve: {report.missing[one]}" for one in chosen[:_NAMED_MAX]]
    if len(chosen) > _NAMED_MAX:
        said.append(f"and {len(chosen) - _NAMED_MAX} more")
    return "; ".join(said)
