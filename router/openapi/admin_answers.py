"""The JSON that operators get: the router's own records, field by field."""

import dataclasses
from typing import Any, get_type_hints

from pydantic import create_model

from disagg.router.openapi.answers import Answered, Fault
from disagg.routing.record import GenerationRecord, RequestRecord
from disagg.routing.worker_view import WorkerView

PLAIN = (bool, int, str, int | None, bool | None, str | None)


class Incarnation(Answered):
    """One life of a worker."""

    worker_id: str
    epoch: str


def _fields(kind: type, **shown: Any) -> dict[str, Any]:
    """Fields of a record by name; what is no plain value is an object, or what ``shown`` says."""
    hints = get_type_hints(kind)
    found: dict[str, Any] = {}
    for one in dataclasses.fields(kind):
        hint = hints[one.name]
        found[one.name] = hint if hint in PLAIN else dict[str, Any] | None
    return {name: (kind, ...) for name, kind in (found | shown).items()}


_worker = _fields(WorkerView, heard_ms_ago=int)
del _worker["heard_ms"]
Worker = create_model("Worker", __base__=Answered, **_worker)
Generation = create_model(
    "Generation",
    __base__=Answered,
    **_fields(
        GenerationRecord,
        prefill=Incarnation,
        decode=Incarnation,
        local=bool,
        considered=list[dict[str, Any]],
    ),
)
Record = create_model(
    "Record",
    __base__=Answered,
    **_fields(
        RequestRecord,
        generations=list[Generation],  # type: ignore[valid-type]
        refused=list[dict[str, Any]],
        cached_tokens=int,
    ),
)


class Workers(Answered):
    """The fleet as the router sees it."""

    workers: list[Worker]  # type: ignore[valid-type]  # made above


class Wait(Answered):
    """A request that waits, or did until lately."""

    role: str
    age_ms: int
    waited_ms: int


class Queues(Answered):
    """How long requests wait for workers, by role."""

    waits: list[Wait]


class Revision(Answered):
    """Workers that may exchange KV, under a name."""

    name: str
    weight: float
    num_workers: int
    num_workers_ready: int
    num_requests: int
    num_running: int
    num_waiting: int
    max_model_tokens: int | None
    model_fingerprint: str | None
    dtype: str | None
    hash_block_tokens: int | None


class Revisions(Answered):
    """All of them, and the weights that were set."""

    weights: dict[str, float]
    revisions: list[Revision]


class ResetWorker(Answered):
    """What a worker made of a reset."""

    worker: Incarnation
    num_forgotten: int
    in_use: dict[str, int]
    error: str | None


class Reset(Answered):
    """What all made of it."""

    success: bool
    num_forgotten: int
    workers: list[ResetWorker]
    error: Fault | None = None


class Drained(Answered):
    """Who was told to drain, or to take work again."""

    workers: list[Incarnation]
    ends: bool
    """They end when nothing goes on any more; else they stay, without work."""
