"""What operators are told of a registration."""

import logging
from collections.abc import Iterable

from disagg.messages.registration import WorkerInfo
from disagg.routing.worker_view import WorkerView

logger = logging.getLogger(__name__)


def warn_of_strangers(info: WorkerInfo, fleet: Iterable[WorkerView]) -> None:
    """Name those of its revision that a new one never exchanges KV with: once a contract."""
    name = info.incarnation.worker_id
    others = {
        view.info.contract: view.info.incarnation.worker_id
        for view in fleet
        if view.info.revision == info.revision
    }
    for contract, other in others.items():
        if why := info.contract.refusal(name, contract, other):
            logger.warning("%s: nothing is handed over between them", why)
