"""Requests that ended, kept for their records."""

from collections import OrderedDict

from disagg.routing.request import RoutedRequest


class EndedRequests:
    """The last ``records_max`` requests that ended, by id; of one id the last."""

    def __init__(self, records_max: int) -> None:
        self._records_max = records_max
        self._requests: OrderedDict[str, RoutedRequest] = OrderedDict()

    def add(self, request: RoutedRequest) -> None:
        """Keep a request, and drop the one that ended first when there are too many."""
        self._requests.pop(request.request_id, None)
        self._requests[request.request_id] = request
        while len(self._requests) > self._records_max:
            self._requests.popitem(last=False)

    def get(self, request_id: str) -> RoutedRequest | None:
        """Find the request; None when it never ended here or was dropped since."""
        return self._requests.get(request_id)
