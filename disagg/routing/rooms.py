"""Which workers have room for one more request: a bound that all routers keep together."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from disagg.messages.identity import Incarnation
from disagg.messages.registration import WorkerInfo
from disagg.messages.session import RouterLoad
from disagg.routing.generation import Generation


class Rooms:
    """Load of every worker at this moment; made anew for each look, so it cannot go out of step.

    A worker has room while fewer than ``prefill_tokens_max`` tokens of prompts wait there to be
    computed, and while it has less than ``waiting_max`` requests more than it runs at once. What
    has no room anywhere waits at the router, where tenants take turns: a worker serves by arrival.

    These bounds are of all routers together, by what workers say each has there. Of ``n`` routers
    that have something at a worker each may have its ``n``-th part, whatever the others have: who
    has filled a worker hears of its own ends first and would never let another in. Beyond its part
    it takes the ``n``-th part of what is free, as the others see it free at the same time. So the
    bound may be exceeded where a router comes to a full worker, or several begin at one moment, by
    once for each further router, and until those with more than their part have given it up.

    Args:
        router: id of this one.
        generations: those of this router that are current.
        loads: what each router has at each worker, by its last stats.
        prefill_tokens_max: so many tokens to prefill close a worker; one prompt may go beyond.
        waiting_max: requests at a worker beyond those that it runs at once.
    """

    def __init__(
        self,
        router: str,
        generations: Iterable[Generation],
        loads: Mapping[Incarnation, Sequence[RouterLoad]],
        prefill_tokens_max: int,
        waiting_max: int,
    ) -> None:
        self._router = router
        self._loads = loads
        self._prefill_tokens_max = prefill_tokens_max
        self._waiting_max = waiting_max
        self._prefill_tokens: Counter[Incarnation] = Counter()
        self._num_requests: Counter[Incarnation] = Counter()
        for generation in generations:
            self.add(generation)

    def add(self, generation: Generation) -> None:
        """Count one more."""
        self._num_requests[generation.decode.incarnation] += 1
        self._prefill_tokens[generation.prefill.incarnation] += generation.num_tokens_to_prefill

    def has_room(self, worker: WorkerInfo) -> bool:
        """Whether a request would not wait long there, whichever part of it."""
        name = worker.incarnation
        loads = self._loads.get(name, ())
        tokens = {load.router: load.num_prefill_tokens for load in loads}
        if self._prefill_tokens[name] >= self._own_part(self._prefill_tokens_max, tokens):
            return False
        if not worker.max_sequences:  # it did not say how many it runs; only its prompts bound it
            return True
        most = worker.max_sequences + self._waiting_max
        requests = {load.router: load.num_requests for load in loads}
        return self._num_requests[name] < self._own_part(most, requests)

    def _own_part(self, most: int, loads: Mapping[str, int]) -> int:
        """What this router may have of a bound."""
        own = loads.get(self._router, 0)
        num_using = 1 + sum(load > 0 for router, load in loads.items() if router != self._router)
        free = most - sum(loads.values())
        return max(1, most // num_using, own + free // num_using)
