"""The whole fleet and the newest requests as one JSON object: what operators look at."""

import asyncio
from collections.abc import Mapping
from importlib.metadata import version
from itertools import islice
from typing import Any

from disagg.messages.identity import Incarnation
from disagg.messages.registration import GroupInfo, WorkerInfo
from disagg.router.callers import Caller
from disagg.router.dispatch import Dispatcher
from disagg.router.openai.sse import to_json
from disagg.router.revision_pages import revision_body
from disagg.router.worker_statuses import Answer
from disagg.routing.record import RequestRecord
from disagg.routing.worker_view import WorkerView
from disagg.wire.v1 import identity_pb2, worker_pb2

REQUESTS_MAX = 50
"""Newest requests shown; each has a record of its own."""
PIECE_BYTES = 1 << 16
"""Made in about 2 ms."""
VERSION = version("disagg")

Answers = Mapping[Incarnation, Answer]


class Overview:
    """Puts together what the router knows and what workers answer.

    Args:
        model_name: the one clients use.
        dispatcher: knows fleet, revisions and requests.
    """

    def __init__(self, model_name: str, dispatcher: Dispatcher) -> None:
        self._model_name = model_name
        self._dispatcher = dispatcher

    async def json(self, caller: Caller, answers: Answers) -> bytes:
        """For a caller, who learns of no other tenant's requests unless it may administer.

        Made in pieces, as a thousand workers with their leases take a tenth of a second: between
        two of them streams go on.
        """
        dispatcher, core = self._dispatcher, self._dispatcher.core
        now_ms = dispatcher.now_ms()
        missing = Answer(None, "it has not been asked yet")
        body = {
            "now_ms": now_ms,
            "router": {
                "router_id": dispatcher.router_id,
                "version": VERSION,
                "model": self._model_name,
                "status": "stopping" if dispatcher.draining else "ok",
                "ready": dispatcher.ready,
                "missing": dispatcher.roles.missing,
                "num_requests": core.num_live,
                "num_waiting": core.num_waiting,
            },
            "revisions": [revision_body(view) for view in core.revision_views()],
            "requests": self._requests(caller),
        }
        workers, num_bytes = [], 0
        for view in core.fleet:
            answer = answers.get(view.info.incarnation, missing)
            workers.append(to_json(worker_body(view, answer, now_ms, caller)))
            num_bytes += len(workers[-1])
            if num_bytes > PIECE_BYTES:
                num_bytes = 0
                await asyncio.sleep(0)
        return to_json(body)[:-1] + b',"workers":[' + b",".join(workers) + b"]}"

    def _requests(self, caller: Caller) -> list[dict[str, Any]]:
        """The newest ones, first who came last."""
        dispatcher = self._dispatcher
        newest = dict.fromkeys(reversed(dispatcher.recent_ids))
        seen = islice(filter(caller.sees, newest), REQUESTS_MAX)
        records = map(dispatcher.core.record, seen)
        return [request_body(one, caller) for one in records if one is not None]


def worker_body(view: WorkerView, answer: Answer, now_ms: int, caller: Caller) -> dict[str, Any]:
    """A worker: its registration, its last stats, its answer."""
    info, stats, status = view.info, view.stats, answer.status
    return {
        "worker_id": info.incarnation.worker_id,
        "epoch": info.incarnation.epoch,
        "role": info.role,
        "revision": info.revision,
        "address": info.address,
        "version": (status.version or None) if status is not None else None,
        "wire": [info.contract.wire_min, info.contract.wire_max],
        "state": state_of(view),
        "heard_ms_ago": now_ms - view.heard_ms,
        "num_requests": view.num_live,
        "max_model_tokens": info.max_model_tokens,
        "num_waiting": stats.num_waiting if stats else None,
        "num_running": stats.num_running if stats else None,
        "num_prefill_tokens_queued": stats.num_prefill_tokens_queued if stats else None,
        "num_reservations": stats.num_reservations if stats else None,
        "pool": _pool(info, view, status),
        "tiers": [{"name": one.name, "num_blocks": one.num_blocks} for one in info.tiers],
        "leases": [_lease(one, caller) for one in status.leases] if status else [],
        "inbound": [_inbound(one, caller) for one in status.inbound] if status else [],
        "answered": status is not None,
        "error": answer.error,
    }


def state_of(view: WorkerView) -> str:
    """``ready``, ``stalled`` (its step takes far too long), ``draining``, ``starting``, ``away``.

    Starting: it has not said that it takes requests.
    """
    if not view.connected:
        return "away"
    if view.stats is not None and view.stats.draining:
        return "draining"
    if view.ready:
        return "stalled" if view.stats is not None and view.stats.stalled else "ready"
    return "starting"


def request_body(record: RequestRecord, caller: Caller) -> dict[str, Any]:
    """A request in few words; its record has the rest."""
    tenant, _, request_id = record.request_id.partition("/") if caller.tenant else ("", "", "")
    current = record.generations[-1] if record.generations else None
    return {
        "request_id": request_id or record.request_id,
        "tenant": tenant,
        "revision": record.revision,
        "state": _state(record),
        "received_ms": record.received_ms,
        "first_token_ms": record.first_token_ms,
        "finished_ms": record.finished_ms,
        "num_prompt_tokens": record.num_prompt_tokens,
        "num_tokens": record.num_tokens,
        "num_generations": len(record.generations),
        "prefill": current.prefill.worker_id if current else None,
        "decode": current.decode.worker_id if current else None,
    }


def _state(record: RequestRecord) -> str:
    if record.outcome:
        return record.outcome
    if not record.generations:
        return "waiting"
    return "decode" if record.first_token_ms is not None else "prefill"


def _pool(
    info: WorkerInfo, view: WorkerView, status: worker_pb2.StatusResponse | None
) -> dict[str, Any]:
    """Its blocks: all, and per group where the worker counts them."""
    stats = view.stats
    counts = list(status.groups) if status is not None else []
    if len(counts) != len(info.groups):
        counts = []
    return {
        "num_blocks_usable": stats.num_blocks_usable if stats else None,
        "num_blocks_free": stats.num_blocks_free if stats else None,
        "num_blocks_quarantined": stats.num_blocks_quarantined if stats else None,
        "groups": [
            _group(number, group, counts[number] if counts else None)
            for number, group in enumerate(info.groups)
        ],
    }


def _group(number: int, group: GroupInfo, count: worker_pb2.GroupBlocks | None) -> dict[str, Any]:
    return {
        "group": number,
        "kind": group.kind,
        "window_tokens": group.window_tokens,
        "block_tokens": group.block_tokens,
        "num_layers": group.num_layers,
        "num_held": count.num_held if count is not None else None,
        "num_cached": count.num_cached if count is not None else None,
    }


def _lease(lease: worker_pb2.LeaseStatus, caller: Caller) -> dict[str, Any]:
    return {
        "lease_id": lease.lease_id,
        "request_id": _name(lease.key, caller),
        "reader": {"worker_id": lease.reader.worker_id, "epoch": lease.reader.epoch},
        "state": lease.state,
        "num_blocks": lease.num_blocks,
    }


def _inbound(entry: worker_pb2.InboundStatus, caller: Caller) -> dict[str, Any]:
    return {
        "request_id": _name(entry.key, caller),
        "owner": {"worker_id": entry.owner.worker_id, "epoch": entry.owner.epoch},
        "state": entry.state,
        "num_blocks": entry.num_blocks,
        "num_reads": entry.num_reads_in_progress,
    }


def _name(key: identity_pb2.RequestKey, caller: Caller) -> str | None:
    """The request's id, as the router keeps it; None for another tenant's."""
    return key.request_id if caller.sees(key.request_id) else None
