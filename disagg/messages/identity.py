"""Identities: requests and their generations, incarnations of workers, attempts of commits."""

from typing import NamedTuple


class RequestKey(NamedTuple):
    """One try of a request: its router counts ``generation`` up whenever it plans anew.

    Two routers may use one request id and generation at a time, so the router is a part of it.
    """

    request_id: str
    generation: int
    router: str = ""
    """Id of the router's life: its name and an epoch of its own."""


class Incarnation(NamedTuple):
    """One life of a worker process: ``epoch`` is random and new at every start."""

    worker_id: str
    epoch: str


class Attempt(NamedTuple):
    """Nonce of one try to read: the reader's epoch and its own counter."""

    reader_epoch: str
    number: int


class LeaseRequest(NamedTuple):
    """One ``AskLease`` or ``TakeOver`` of a reader; its ``number`` counts up within its epoch."""

    reader: Incarnation
    key: RequestKey
    number: int
