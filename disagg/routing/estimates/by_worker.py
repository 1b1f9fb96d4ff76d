"""Something of each request, at one worker at a time."""

from collections.abc import Collection
from typing import Generic, TypeVar

from disagg.messages.identity import Incarnation

T = TypeVar("T")


class ByWorker(Generic[T]):
    """Of each request one thing, found by the worker where it is; nothing stays of who has gone."""

    def __init__(self) -> None:
        self._at: dict[Incarnation, dict[str, T]] = {}
        self._where: dict[str, Incarnation] = {}

    def put(self, worker: Incarnation, request_id: str, thing: T) -> None:
        """A request's is at this worker, the last one there, and nowhere else from now on."""
        self.drop(request_id)
        self._where[request_id] = worker
        self._at.setdefault(worker, {})[request_id] = thing

    def drop(self, request_id: str) -> None:
        """A request's is nowhere; unknown ones are ignored."""
        worker = self._where.pop(request_id, None)
        if worker is not None:
            there = self._at[worker]
            del there[request_id]
            if not there:
                del self._at[worker]

    def at(self, worker: Incarnation) -> Collection[T]:
        """Those at a worker, the oldest first."""
        return self._at.get(worker, {}).values()
