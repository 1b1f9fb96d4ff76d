"""What is looked at in a registration before a worker is taken in, and what operators are told."""

import logging
from collections.abc import Iterable

from disagg.errors import ConfigError
from disagg.messages.registration import WorkerInfo
from disagg.routing.fleet import WORKERS_MAX
from disagg.routing.worker_view import WorkerView
from disagg.wire.checks import NAME_CHARS_MAX

logger = logging.getLogger(__name__)


def check_tokenizer(info: WorkerInfo, ours: str) -> None:
    """Refuse a worker whose checkpoint has another tokenizer than this router's.

    Prompts and answers would be other text there.

    Args:
        info: of the worker.
        ours: digest of the router's tokenizer.

    Raises:
        ConfigError: naming both.
    """
    theirs = info.tokenizer_digest
    if ours and theirs and ours != theirs:
        raise ConfigError(
            f"the checkpoint of {info.incarnation.worker_id} has another tokenizer or "
            f"vocabulary than this router's model.dir ({theirs[:16]} there, {ours[:16]} here): "
            "it needs a router of its own",
            param="tokenizer_digest",
        )


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


class Refusals:
    """Logs why workers are refused: once a process and cause, as it tries again and again.

    Args:
        told: what is logged, with places for the worker's id and the cause.
    """

    def __init__(self, told: str) -> None:
        self._told = told
        self._last: dict[tuple[str, str], int] = {}  # hashes: a contract has any length

    def refused(self, worker_id: str, epoch: str, why: str) -> None:
        """A worker was told so, as maybe before."""
        worker, cause = (worker_id[:NAME_CHARS_MAX], epoch[:NAME_CHARS_MAX]), hash(why)
        if self._last.pop(worker, None) != cause:
            logger.warning(self._told, worker[0], why)
        self._last[worker] = cause
        if len(self._last) > WORKERS_MAX:
            del self._last[next(iter(self._last))]

    def knows(self, worker_id: str, epoch: str) -> bool:
        """Whether it was refused, and not taken in since."""
        return bool(self._last) and (worker_id, epoch) in self._last

    def taken_in(self, worker_id: str, epoch: str) -> None:
        """The next time it is refused it is news; another process of that id still is none."""
        self._last.pop((worker_id, epoch), None)
