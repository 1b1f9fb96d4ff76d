"""What every worker lends, pulls and quarantines, as the workers themselves report it."""

from dataclasses import dataclass
from typing import Any

import grpc

from disagg.commands.router_client import as_router, call_router
from disagg.tls.connections import client_channel
from disagg.wire.v1 import identity_pb2, worker_pb2, worker_pb2_grpc

WORKERS_PATH = "/v1/disagg/workers"


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """A worker as the router knows it."""

    worker_id: str
    epoch: str
    role: str
    address: str


@dataclass(frozen=True, slots=True)
class WorkerLeases:
    """One worker's answer, or why there is none."""

    worker: WorkerAddress
    status: worker_pb2.StatusResponse | None
    error: str = ""


def find_workers(router_url: str, timeout_s: float) -> list[WorkerAddress]:
    """Fetch the router's list of workers, in the order of their names, with DISAGG_API_KEY.

    Raises:
        ConfigError: the URL is no http URL.
        RemoteFault: no router answers there in time, or something else does.
    """
    told = call_router(router_url, WORKERS_PATH, timeout_s, scope="observe")
    with as_router(router_url):
        workers = [_address(view["info"]) for view in told["workers"]]
    return sorted(workers, key=lambda worker: worker.worker_id)


def ask_workers(
    workers: list[WorkerAddress], timeout_s: float, tls_directory: str
) -> list[WorkerLeases]:
    """Fetch all workers' status at once; one that does not answer in time is reported as such.

    Raises:
        ConfigError: the certificate cannot be used.
    """
    channels = [client_channel(worker.address, tls_directory) for worker in workers]
    try:
        asked = [
            worker_pb2_grpc.WorkerStub(channel).Status.future(
                worker_pb2.StatusRequest(), timeout=timeout_s
            )
            for channel in channels
        ]
        hint = "" if tls_directory else " (does it want a node's certificate? --tls-directory)"
        return [_answer(worker, call, hint) for worker, call in zip(workers, asked, strict=True)]
    finally:
        for channel in channels:
            channel.close()


def as_json(answers: list[WorkerLeases]) -> dict[str, Any]:
    """The view as JSON, for programs."""
    return {"workers": [_as_json(answer) for answer in answers]}


def key_text(key: identity_pb2.RequestKey) -> str:
    """A request's id and its generation, as one text."""
    return f"{key.request_id}#{key.generation}"


def worker_text(who: identity_pb2.Incarnation) -> str:
    """A worker and the beginning of its epoch."""
    return f"{who.worker_id}:{who.epoch[:8]}"


def _address(info: Any) -> WorkerAddress:
    known = info["incarnation"]
    fields = (known["worker_id"], known["epoch"], info["role"], info["address"])
    if not all(isinstance(field, str) for field in fields):
        raise TypeError(f"a worker is described by texts, not {fields}")
    return WorkerAddress(*fields)


def _answer(worker: WorkerAddress, call: Any, hint: str) -> WorkerLeases:
    try:
        status: worker_pb2.StatusResponse = call.result()
    except grpc.RpcError as error:
        hint = hint if error.code() is grpc.StatusCode.UNAVAILABLE else ""
        return WorkerLeases(worker, None, f"{error.code().name}: {error.details()}{hint}")
    if status.worker.epoch != worker.epoch:
        # Restarted, and not yet registered again; or another worker has taken the port.
        return WorkerLeases(worker, None, f"{worker_text(status.worker)} answers at its address")
    return WorkerLeases(worker, status)


def _as_json(answer: WorkerLeases) -> dict[str, Any]:
    worker, status = answer.worker, answer.status
    shown: dict[str, Any] = {
        "worker_id": worker.worker_id,
        "epoch": worker.epoch,
        "role": worker.role,
        "address": worker.address,
        "answered": status is not None,
        "error": answer.error,
    }
    if status is None:
        return shown
    stats = status.stats
    return shown | {
        "ready": stats.ready,
        "num_blocks_usable": stats.num_blocks_usable,
        "num_blocks_free": stats.num_blocks_free,
        "num_blocks_quarantined": stats.num_blocks_quarantined,
        "num_reservations": stats.num_reservations,
        "leases": [
            {
                "lease_id": lease.lease_id,
                "request": key_text(lease.key),
                "reader": {"worker_id": lease.reader.worker_id, "epoch": lease.reader.epoch},
                "state": lease.state,
                "num_blocks": lease.num_blocks,
            }
            for lease in status.leases
        ],
        "inbound": [
            {
                "request": key_text(entry.key),
                "owner": {"worker_id": entry.owner.worker_id, "epoch": entry.owner.epoch},
                "state": entry.state,
                "num_blocks": entry.num_blocks,
                "num_reads_in_progress": entry.num_reads_in_progress,
            }
            for entry in status.inbound
        ],
    }
