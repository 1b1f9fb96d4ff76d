"""Requests that wait by choice: behind which workers, and when they are looked at again."""

from collections.abc import Container
from dataclasses import dataclass
from itertools import islice
from math import ceil

from disagg.routing.policy.protocol import Plan
from disagg.routing.request import RoutedRequest
from disagg.routing.worker import Worker

LOOK_MS_MAX = 50
"""Also where the workers behind which one waits have done nothing, others may be better by then;
shorter than the work that a worker is left with while one waits for it."""

SEEN_MAX = 16
"""Of those that wait, at whose workers is looked at one time."""

Load = tuple[tuple[int, int], int, int]


@dataclass(slots=True)
class _Hold:
    workers: tuple[Worker, Worker]
    loads: tuple[Load, ...]
    """Of those, when it was looked at last."""
    look_ms: int


class Holds:
    """Who waits by choice, by whose turn it is to be looked at again.

    A plan takes up to a millisecond and workers report with every step: so one is planned anew when
    the workers that it would go to have begun with, or done, something else, and now and then.
    """

    def __init__(self) -> None:
        self._holds: dict[str, _Hold] = {}

    def __len__(self) -> int:
        return len(self._holds)

    def add(self, now_ms: int, request: RoutedRequest, plan: Plan) -> bool:
        """A request had better wait than go where this plan says.

        Returns:
            Whether it did not wait so before.
        """
        request.held_until_ms = now_ms + ceil(plan.hold_ms)
        workers = plan.prefill.worker, plan.decode.worker
        look_ms = min(request.held_until_ms, now_ms + LOOK_MS_MAX)
        is_new = request.request_id not in self._holds
        self._holds[request.request_id] = _Hold(workers, _loads(workers), look_ms)
        return is_new

    def end(self, request_id: str) -> None:
        """A request waits no more, or is as all others; unknown ones are ignored."""
        self._holds.pop(request_id, None)

    def is_due(self, now_ms: int, request_id: str) -> bool:
        """Whether a request is to be planned, as all are who do not wait by choice."""
        hold = self._holds.get(request_id)
        return hold is None or hold.look_ms <= now_ms or _loads(hold.workers) != hold.loads

    def in_turn(self, now_ms: int, but: Container[str], num_max: int) -> list[str]:
        """Those whose turn it is, of a few, and who are to be planned.

        Args:
            now_ms: the time.
            but: nobody of these.
            num_max: at most so many.
        """
        found: list[str] = []
        for one in list(islice(self._holds, SEEN_MAX)):
            self._holds[one] = self._holds.pop(one)  # the turn goes to others
            if one not in but and self.is_due(now_ms, one):
                found.append(one)
                if len(found) == num_max:
                    break
        return found


def _loads(workers: tuple[Worker, ...]) -> tuple[Load, ...]:
    return tuple((one.prefill_queue, one.num_decoding, one.num_coming) for one in workers)
