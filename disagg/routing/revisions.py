"""Revisions of the model side by side: who may exchange KV, and whose turn a new request is."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from disagg.errors import ConfigError, RemoteFault, RequestError
from disagg.messages.registration import REVISION_NAME, Contract, WorkerInfo

REVISIONS_MAX = 16
"""That have workers at a time."""
WEIGHTS_MAX = 64
WEIGHT_MAX = 1e6
_COMMON_FIELDS = ("model_fingerprint", "hash_block_tokens", "hash_scheme")
"""Of a contract, the same for all workers of a revision: any of them could serve its requests."""
_DRAWS = 2.0**64

HashExtend = Callable[[list[bytes], Sequence[int], bytes], None]
"""``BlockHasher.extend``: appends the hashes of newly full blocks."""
HasherOf = Callable[[WorkerInfo], HashExtend]
"""What names blocks as a worker does; raises ConfigError where nothing here does."""


class Revision:
    """Workers of one checkpoint that name its blocks alike, from the first one to the last.

    Those that come under its name after the last one has left are another revision: two are
    compared by identity.

    Attributes:
        name: what its workers call it.
        contract: of its first worker.
        hash_extend: names blocks as its workers do.
        num_requests: that were let in for it.
    """

    def __init__(self, info: WorkerInfo, hash_extend: HashExtend) -> None:
        self.name = info.revision
        self.contract = info.contract
        self.hash_extend = hash_extend
        self.num_requests = 0
        self._contracts: dict[str, Contract] = {}
        """By worker id."""

    def __repr__(self) -> str:
        return f"Revision({self.name!r}, {sorted(self._contracts)})"

    @property
    def num_workers(self) -> int:
        """0: it has gone."""
        return len(self._contracts)

    def hashes(self, token_ids: Sequence[int], cache_salt: bytes) -> list[bytes]:
        """Chain values of the full hash blocks of a prompt; may run in any thread."""
        hashes: list[bytes] = []
        self.hash_extend(hashes, token_ids, cache_salt)
        return hashes

    def add(self, info: WorkerInfo) -> WorkerInfo:
        """Take a worker in that was checked; returns its registration, contracts shared."""
        for contract in self._contracts.values():
            if contract == info.contract:
                # One object: policies compare contracts for every request.
                info = replace(info, contract=contract)
                break
        self._contracts[info.incarnation.worker_id] = info.contract
        return info

    def remove(self, info: WorkerInfo) -> None:
        """Forget a worker."""
        del self._contracts[info.incarnation.worker_id]

    def check(self, info: WorkerInfo, *, accept_unlike: bool) -> None:
        """Refuse a worker that does not fit in.

        Raises:
            ConfigError: it serves another checkpoint or hashes it otherwise; or exchanges no KV
                with one of the others, and that is not accepted.
        """
        name = info.incarnation.worker_id
        differing = [
            f"{field}: revision {getattr(self.contract, field)!r}, {name} "
            f"{getattr(info.contract, field)!r}"
            for field in _COMMON_FIELDS
            if getattr(self.contract, field) != getattr(info.contract, field)
        ]
        if differing:
            raise ConfigError(
                f"worker {name} serves another model than the revision {self.name!r} or hashes it "
                f"otherwise: {'; '.join(differing)}. Another model.revision lets it serve beside "
                "that one",
                param="contract",
            )
        seen: set[int] = set()
        for other, theirs in self._contracts.items():
            if id(theirs) in seen:
                continue  # equal contracts are one object: a thousand workers have a few
            # Another type of KV never is accepted: answers would depend on who gives them.
            if other == name or (accept_unlike and info.contract.dtype == theirs.dtype):
                continue
            seen.add(id(theirs))
            if why := info.contract.refusal(name, theirs, other):
                raise ConfigError(
                    f"workers {name} and {other} cannot exchange KV: {why}",
                    param="contract",
                )


@dataclass(frozen=True, slots=True)
class RevisionView:
    """A revision as operators see it."""

    name: str
    weight: float
    """Its part of the new requests, relative to the others'."""
    contract: Contract | None
    """None: no worker of it is here; only its weight is known."""
    num_workers: int = 0
    num_ready: int = 0
    max_model_tokens: int = 0
    """Longest prompt plus output that a ready worker of it can end; 0 without one."""
    num_requests: int = 0
    """That were let in for it since its first worker came."""
    num_running: int = 0
    num_waiting: int = 0


class Revisions:
    """All revisions that have a worker, and the weights by which new requests are shared.

    A revision lives from its first worker to its last, so no contract outlives its workers.

    Args:
        hasher_of: names blocks as a worker does.
        weights: by name. Where there are any, who has none gets no new request; without any all
            revisions have the same.
        accept_unlike: workers that exchange no KV with the others of their revision are taken in.

    Raises:
        ConfigError: a weight cannot be used.
    """

    def __init__(
        self,
        hasher_of: HasherOf,
        weights: Mapping[str, float] | None = None,
        *,
        accept_unlike: bool = False,
    ) -> None:
        self._hasher_of = hasher_of
        self._accept_unlike = accept_unlike
        self._weights = check_weights(weights or {})
        self._by_name: dict[str, Revision] = {}

    def __iter__(self) -> Iterator[Revision]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, revision: Revision) -> bool:
        return self._by_name.get(revision.name) is revision

    @property
    def weights(self) -> Mapping[str, float]:
        """As they were set; empty: all revisions have the same."""
        return self._weights

    @weights.setter
    def weights(self, weights: Mapping[str, float]) -> None:
        self._weights = check_weights(weights)

    def weight(self, name: str) -> float:
        """Of a revision by this name."""
        return self._weights.get(name, 0.0) if self._weights else 1.0

    def add(self, info: WorkerInfo) -> WorkerInfo:
        """Take a worker in that was checked; returns its registration, contracts shared."""
        revision = self._by_name.get(info.revision)
        if revision is None:
            revision = Revision(info, self._hasher_of(info))
            # In order: they are looked through with every request.
            self._by_name = dict(sorted([*self._by_name.items(), (info.revision, revision)]))
        return revision.add(info)

    def remove(self, info: WorkerInfo) -> None:
        """Forget a worker, and its revision with the last one."""
        revision = self._by_name[info.revision]
        revision.remove(info)
        if not revision.num_workers:
            del self._by_name[info.revision]

    def check(self, info: WorkerInfo) -> None:
        """Refuse a worker that does not fit into the revision that it names.

        Raises:
            ConfigError: see `Revision.check`; its blocks are named by another secret; or there are
                too many revisions.
        """
        self._hasher_of(info)
        revision = self._by_name.get(info.revision)
        if revision is not None:
            revision.check(info, accept_unlike=self._accept_unlike)
        elif len(self._by_name) >= REVISIONS_MAX:
            raise ConfigError(f"more than {REVISIONS_MAX} revisions", param="revision")

    def serving(self, able: Collection[str]) -> list[Revision]:
        """Those that take new requests: of ``able`` ones all that have a weight."""
        return [one for one in self if one.name in able and self.weight(one.name) > 0]

    def assign(self, request_id: str, able: Collection[str]) -> Revision:
        """The revision that serves a request: the same for equal ids, weights and able ones.

        Shares follow the weights over many ids. Where weight moves from one to another, no request
        changes over between two others, or the other way.

        Args:
            request_id: decides.
            able: names of revisions that could serve it.

        Raises:
            RemoteFault: none of them takes new requests.
        """
        serving = self.serving(able)
        if not serving:
            if not able:
                raise RemoteFault("no worker is ready", retry_after_s=1)
            raise RemoteFault(
                f"no ready worker takes new requests: those of the revisions "
                f"{', '.join(sorted(able))} have no weight (router.revision_weights)",
                retry_after_s=1,
            )
        if len(serving) == 1:
            return serving[0]
        weights = [self.weight(one.name) for one in serving]
        drawn = int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest()) / _DRAWS
        left = drawn * sum(weights)
        for revision, weight in zip(serving, weights, strict=True):
            left -= weight
            if left < 0:
                return revision
        return serving[-1]  # rounding


def parse_revision_weights(given: Sequence[str]) -> dict[str, float]:
    """Weights by revision, from ``NAME=WEIGHT`` each.

    Raises:
        ConfigError: one is not of that form, out of bounds, or given twice.
    """
    weights: dict[str, float] = {}
    for text in given:
        name, _, number = text.rpartition("=")
        if name in weights:
            raise ConfigError(f"{name!r} is given twice")
        try:
            weights[name] = float(number)
        except ValueError:
            raise ConfigError(f"{text!r} is not NAME=WEIGHT") from None
    return check_weights(weights)


def check_weights(given: Mapping[str, Any]) -> dict[str, float]:
    """The same weights, all usable.

    Raises:
        ConfigError: a name or a number is none, all are 0, or there are too many.
    """
    if len(given) > WEIGHTS_MAX:
        raise ConfigError(f"{len(given)} weights are more than {WEIGHTS_MAX}")
    for name, weight in given.items():
        if not REVISION_NAME.fullmatch(name):
            raise ConfigError(f"{name[:64]!r} cannot be the name of a revision")
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not math.isfinite(weight) or not 0 <= weight <= WEIGHT_MAX:
            raise ConfigError(f"the weight of {name} must be a number from 0 to {WEIGHT_MAX:g}")
    if given and not any(given.values()):
        raise ConfigError("some weight must be above 0")
    return {name: float(weight) for name, weight in given.items()}


def refuse_to_serve_nobody(weights: Mapping[str, float], able: Collection[str]) -> None:
    """Raise RequestError where weights would leave none of the able revisions in service."""
    if weights and able and not any(weights.get(name) for name in able):
        raise RequestError(
            f"gives nothing to the revisions that are ready ({', '.join(sorted(able))}): no "
            "request would be served",
            param="weights",
        )
