"""Which workers have room for one more request, by what this router has going on there."""

from collections import Counter
from collections.abc import Iterable

from disagg.messages.identity import Incarnation
from disagg.messages.registration import WorkerInfo
from disagg.routing.generation import Generation


class Rooms:
    """Load of every worker at this moment; made anew for each look, so it cannot go out of step.

    A worker has room while fewer than ``prefill_tokens_max`` tokens of prompts wait there to be
    computed, and while it has less than ``waiting_max`` requests more than it runs at once. What
    has no room anywhere waits at the router, where tenants take turns: a worker serves by arrival.

    Args:
        generations: those that are current.
        prefill_tokens_max: so many tokens to prefill close a worker; one prompt may go beyond.
        waiting_max: requests at a worker beyond those that it runs at once.
    """

    def __init__(
        self, generations: Iterable[Generation], prefill_tokens_max: int, waiting_max: int
    ) -> None:
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
        if self._prefill_tokens[name] >= self._prefill_tokens_max:
            return False
        # 0: it did not say how many it runs; only its prompts bound it then.
        most = worker.max_sequences
        return not most or self._num_requests[name] < most + self._waiting_max
