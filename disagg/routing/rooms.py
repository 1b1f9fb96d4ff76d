"""Which workers have room for one more request: a bound that all routers keep together."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from disagg.messages.identity import Incarnation
from disagg.messages.stats import RouterLoad
from disagg.routing.generation import Generation
from disagg.routing.worker import Worker


@dataclass(frozen=True, slots=True)
class _Bounds:
    bit: int
    prefill_tokens: int
    num_requests: int | None
    """None: it did not say how many it runs; only its prompts bound it."""


class Rooms:
    """Load of every worker by what this router has there and by what workers say of the others.

    A worker has room while fewer than ``prefill_tokens_max`` tokens of prompts wait there to be
    computed, and while it has less than ``waiting_max`` requests more than it runs at once. What
    has no room anywhere waits at the router, where tenants take turns: a worker serves by arrival.

    These bounds are of all routers together, by what workers say each has there. Of ``n`` routers
    that have something at a worker each may have its ``n``-th part, whatever the others have: who
    has filled a worker hears of its own ends first and would never let another in. Beyond its part
    it takes the ``n``-th part of what is free, as the others see it free at the same time. So the
    bound may be exceeded where a router comes to a full worker, or several begin at one moment, by
    once for each further router, and until those with more than their part have given it up.

    A request counts with its current generation, so what is counted twice is counted once. One that
    is given up before its workers have said that they received it counts until they have: else a
    client that leaves again and again would fill the streams to them, ahead of everybody.

    Args:
        router: id of this one.
        prefill_tokens_max: so many tokens to prefill close a worker; one prompt may go beyond.
        waiting_max: requests at a worker beyond those that it runs at once.

    Attributes:
        router: its id.
        roomy: bits of the workers where a request would not wait long, whichever part of it.
    """

    def __init__(self, router: str, prefill_tokens_max: int, waiting_max: int) -> None:
        self.roomy = 0
        self.router = router
        self._prefill_tokens_max = prefill_tokens_max
        self._waiting_max = waiting_max
        self._bounds: dict[Incarnation, _Bounds] = {}
        self._counted: dict[str, tuple[Incarnation, Incarnation, int]] = {}
        """By request: who decodes it, who prefills it, and tokens of that."""
        self._ended: dict[int, tuple[set[Incarnation], tuple[Incarnation, Incarnation, int]]] = {}
        """By generation the same of those that have ended, and who has not received them yet."""
        self._telling: set[Incarnation] = set()
        """Workers that say what they have received."""
        self._prefill_tokens: Counter[Incarnation] = Counter()
        self._num_requests: Counter[Incarnation] = Counter()

    def put(self, bit: int, worker: Worker) -> None:
        """A worker is new, or has said something new of its limits or loads."""
        info = worker.info
        loads = worker.stats.loads if worker.stats is not None else ()
        num_requests = None
        if info.max_sequences:
            most = info.max_sequences + self._waiting_max
            num_requests = self._own_part(most, loads, [load.num_requests for load in loads])
        tokens = [load.num_prefill_tokens for load in loads]
        prefill_tokens = self._own_part(self._prefill_tokens_max, loads, tokens)
        self._bounds[info.incarnation] = _Bounds(bit, prefill_tokens, num_requests)
        self._look([info.incarnation])

    def remove(self, worker: Incarnation) -> set[Incarnation]:
        """A worker has left; what requests have there goes on to count, for it may come back.

        Returns as `count` does.
        """
        self.roomy &= ~self._bounds.pop(worker).bit
        self._telling.discard(worker)
        waiting = [number for number, (missing, _) in self._ended.items() if worker in missing]
        return {one for number in waiting for one in self._no_more_missing(worker, number)}

    def prefill_tokens(self, worker: Incarnation) -> int:
        """That this router's requests have to prefill there, as far as it knows."""
        return self._prefill_tokens[worker]

    def count(self, request_id: str, generation: Generation) -> tuple[Incarnation, ...]:
        """A request has begun there, was planned anew, or its prompt is computed.

        Returns:
            Workers of which something may be counted that was not before.
        """
        decode, prefill = generation.decode.incarnation, generation.prefill.incarnation
        tokens = generation.num_tokens_to_prefill
        before = self._counted.get(request_id)
        changed: tuple[Incarnation, ...] = (prefill,)
        if before is not None and before[:2] == (decode, prefill):
            self._prefill_tokens[prefill] += tokens - before[2]
        else:
            changed = (*self.forget(request_id), decode, prefill)
            self._num_requests[decode] += 1
            self._prefill_tokens[prefill] += tokens
        self._look(changed)
        self._counted[request_id] = decode, prefill, tokens
        return changed

    def end(self, request_id: str, generation: Generation) -> tuple[Incarnation, ...]:
        """A request has ended; unknown ones are ignored. Returns as `count` does."""
        missing = self._telling.intersection(generation.workers) - generation.received_at
        if not missing or request_id not in self._counted:
            return self.forget(request_id)
        self._ended[generation.key.generation] = missing, self._counted.pop(request_id)
        return ()

    def received(self, worker: Incarnation, number: int) -> tuple[Incarnation, ...]:
        """The submit of a generation has come there. Returns as `count` does."""
        self._telling.add(worker)
        return self._no_more_missing(worker, number) if number in self._ended else ()

    def forget(self, request_id: str) -> tuple[Incarnation, ...]:
        """Count a request no more; unknown ones are ignored. Returns as `count` does."""
        counted = self._counted.pop(request_id, None)
        return () if counted is None else self._uncount(counted)

    def _no_more_missing(self, worker: Incarnation, number: int) -> tuple[Incarnation, ...]:
        missing, counted = self._ended[number]
        missing.discard(worker)
        if missing:
            return ()
        del self._ended[number]
        return self._uncount(counted)

    def _uncount(self, counted: tuple[Incarnation, Incarnation, int]) -> tuple[Incarnation, ...]:
        decode, prefill, tokens = counted
        self._num_requests[decode] -= 1
        self._prefill_tokens[prefill] -= tokens
        self._look((decode, prefill))
        for counts, worker in ((self._num_requests, decode), (self._prefill_tokens, prefill)):
            if not counts[worker]:
                del counts[worker]
        return decode, prefill

    def _look(self, workers: Iterable[Incarnation]) -> None:
        for worker in workers:
            if (bounds := self._bounds.get(worker)) is not None:
                most = bounds.num_requests
                has_room = self._prefill_tokens[worker] < bounds.prefill_tokens and (
                    most is None or self._num_requests[worker] < most
                )
                self.roomy = self.roomy | bounds.bit if has_room else self.roomy & ~bounds.bit

    def _own_part(self, most: int, loads: Sequence[RouterLoad], numbers: Sequence[int]) -> int:
        """What this router may have of a bound; ``numbers`` are what each of the loads has."""
        by_router = {load.router: number for load, number in zip(loads, numbers, strict=True)}
        own = by_router.get(self.router, 0)
        num_using = 1 + sum(n > 0 for router, n in by_router.items() if router != self.router)
        free = most - sum(by_router.values())
        return max(1, most // num_using, own + free // num_using)
