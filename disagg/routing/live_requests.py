"""The requests that were begun and have not ended, and the records of the last ones that have."""

from collections import Counter
from collections.abc import Iterator

from disagg.messages.identity import Incarnation, RequestKey
from disagg.routing.end_pace import EndPace
from disagg.routing.ended_requests import EndedRequests
from disagg.routing.fleet import Fleet
from disagg.routing.generation import Generation
from disagg.routing.record import RequestRecord
from disagg.routing.request import RoutedRequest


class LiveRequests:
    """Live requests by id; whoever has to know of an end is told here.

    Args:
        fleet: whose rooms and speeds count what is live.
        pace: told of every beginning and end.
        counters: of ends, by their outcome.
        records_max: ended requests whose record is kept.

    Attributes:
        has_freed: a request has ended or a prompt was computed, until the reader sets it back.
        num_by_tenant: how many each tenant has; 0 for one that has none.
    """

    def __init__(
        self, fleet: Fleet, pace: EndPace, counters: Counter[tuple[str, str]], records_max: int
    ) -> None:
        self._fleet = fleet
        self._pace = pace
        self._counters = counters
        self._requests: dict[str, RoutedRequest] = {}
        self._ended = EndedRequests(records_max)
        self.has_freed = False
        self.num_by_tenant: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[RoutedRequest]:
        """Of those that are live now; they may end meanwhile."""
        return iter(list(self._requests.values()))

    def get(self, request_id: str) -> RoutedRequest | None:
        """The live request of that id."""
        return self._requests.get(request_id)

    def concerned(self, worker: Incarnation, key: RequestKey) -> RoutedRequest | None:
        """The request whose current generation this is, if the worker has a part in it."""
        request = self._requests.get(key.request_id)
        if request is None or request.current.key != key:
            return None
        return request if worker in request.current.workers else None

    def find(self, request_id: str) -> RoutedRequest | None:
        """The live request of that id, or the last one that has ended."""
        return self._requests.get(request_id) or self._ended.get(request_id)

    def record(self, request_id: str) -> RequestRecord | None:
        """Record of a live or recently ended request; None if it is unknown."""
        request = self.find(request_id)
        return None if request is None else request.record()

    def generations(self) -> Iterator[Generation]:
        """The current generation of every request."""
        return (request.current for request in self._requests.values())

    def num_by_worker(self) -> Counter[Incarnation]:
        """Number of live generations in which each worker has a part."""
        return Counter(worker for one in self.generations() for worker in one.workers)

    def add(self, now_ms: int, request: RoutedRequest) -> None:
        """A request begins: its first generation, at this time."""
        self._pace.begin(now_ms)
        self._requests[request.request_id] = request
        self.num_by_tenant[request.tenant] += 1

    def end(self, now_ms: int, request: RoutedRequest, outcome: str, error: str = "") -> None:
        """A live request ends: what it took is free again."""
        del self._requests[request.request_id]
        self.num_by_tenant[request.tenant] -= 1
        if not self.num_by_tenant[request.tenant]:
            del self.num_by_tenant[request.tenant]
        self._fleet.end(request.request_id, request.current)
        self._fleet.speeds.answers.end(request.request_id)
        self.has_freed = True
        self._pace.end(now_ms, request.generations[0].started_ms)
        self._fleet.speeds.answered(request.num_tokens)
        self.keep(now_ms, request, outcome, error)

    def keep(self, now_ms: int, request: RoutedRequest, outcome: str, error: str) -> None:
        """Keep the record of a request that has ended, or ends before it had its turn."""
        request.end(now_ms, outcome, error)
        self._counters["requests_ended", outcome] += 1
        self._ended.add(request)
