"""Workers, requests and a router for the tests of routing, with everything else defaulted."""

from dataclasses import fields, replace

from disagg.errors import DisaggError
from disagg.kv.hashing import BlockHasher
from disagg.messages.identity import Incarnation
from disagg.messages.kv_events import BlocksStored, TierStored
from disagg.messages.outputs import FinishReason, SequenceOutput, StepOutputs
from disagg.messages.registration import Contract, GroupInfo, WorkerInfo
from disagg.messages.reports import TransferReport
from disagg.messages.sampling import SamplingParams
from disagg.messages.session import Cancel, EndReason, PartEnded
from disagg.messages.stats import WorkerStats
from disagg.messages.submit import Submit
from disagg.routing.actions import Deliver, Disconnect, Fail, NewRequest, RouterAction, ToWorker
from disagg.routing.core import RouterCore
from disagg.routing.options import RoutingOptions
from disagg.routing.policy.protocol import PolicyOptions
from disagg.routing.policy.registry import DEFAULT_POLICY
from disagg.routing.record import RequestRecord
from disagg.routing.revisions import HashExtend

HASH_TOKENS = 4
HASHER = BlockHasher(b"test", HASH_TOKENS)
FULL = GroupInfo("full_attention", 4, 0, 1, 1024)
WINDOW = GroupInfo("sliding_window", 4, 9, 5, 1024)
CONTRACT = Contract(
    "model-a", "float32", ("full", "window"), "pages", 1024, HASH_TOKENS, "sha256-chain-v1", 1, 1
)
OPTIONS = {field.name for field in fields(PolicyOptions)}
STATS = WorkerStats(0, 0, 0, 100, 100, 0, 0, 0, 0, ready=True)


def worker(name: str, role: str = "both", *, epoch: str = "e1", **changes: object) -> WorkerInfo:
    info = WorkerInfo(
        Incarnation(name, epoch),
        f"{name}:1",
        role,
        "m",
        CONTRACT,
        (FULL, WINDOW),
        1000,
        500,
        100,
    )
    return replace(info, **changes)  # type: ignore[arg-type]


def hashes_of(token_ids: tuple[int, ...], salt: bytes = b"") -> tuple[bytes, ...]:
    hashes: list[bytes] = []
    HASHER.extend(hashes, token_ids, salt)
    return tuple(hashes)


def request(
    request_id: str = "r",
    num_tokens: int = 10,
    max_tokens: int = 5,
    num_logprobs: int | None = None,
    tenant: str = "",
) -> NewRequest:
    tokens = tuple(range(100, 100 + num_tokens))
    sampling = SamplingParams(max_tokens, num_logprobs=num_logprobs, seed=7)
    return NewRequest(request_id, tokens, hashes_of(tokens), b"", sampling, tenant)


def hasher_of(info: WorkerInfo) -> HashExtend:
    """Blocks of the contract's size, named for its model."""
    size = info.contract.hash_block_tokens
    if (info.contract.model_fingerprint, size) == (CONTRACT.model_fingerprint, HASH_TOKENS):
        return HASHER.extend
    return BlockHasher(info.contract.model_fingerprint.encode(), size).extend


class Router:
    """A core with its clock; keeps the actions of the last call, readable by kind."""

    def __init__(
        self,
        *workers: WorkerInfo,
        policy: str = DEFAULT_POLICY,
        accept_unlike_workers: bool = False,
        tenant_weights: dict[str, float] | None = None,
        revision_weights: dict[str, float] | None = None,
        router_id: str = "",
        **limits: float,
    ) -> None:
        options = {name: limits.pop(name) for name in OPTIONS & limits.keys()}
        arguments = {
            "replans_max": 3,
            "requests_max": 8,
            "request_timeout_ms": 1000,
            "records_max": 4,
            "worker_silent_ms": 100,
        }
        self.core = RouterCore(
            RoutingOptions(
                hasher_of=hasher_of,
                policy=policy,
                accept_unlike_workers=accept_unlike_workers,
                tenant_weights=tenant_weights,
                revision_weights=revision_weights,
                router_id=router_id,
                policy_options=PolicyOptions(**options),  # type: ignore[arg-type]
                **(arguments | limits),  # type: ignore[arg-type]
            )
        )
        self.now_ms = 0
        self.actions: list[RouterAction] = []
        for info in workers:
            self.join(info)

    def join(self, info: WorkerInfo, stats: WorkerStats = STATS) -> None:
        self.did(self.core.register(self.now_ms, info))
        self.core.session_up(self.now_ms, info.incarnation)
        self.core.from_worker(self.now_ms, info.incarnation, stats)

    def did(self, actions: list[RouterAction]) -> list[RouterAction]:
        self.actions = actions
        return actions

    def generate(self, new: NewRequest | None = None) -> list[RouterAction]:
        return self.did(self.core.generate(self.now_ms, new or request()))

    def tokens(
        self,
        who: WorkerInfo,
        submit: Submit,
        position: int,
        *token_ids: int,
        finish: FinishReason = FinishReason.NONE,
    ) -> list[RouterAction]:
        output = SequenceOutput(submit.key, position, token_ids, (), finish)
        message = StepOutputs((output,))
        return self.did(self.core.from_worker(self.now_ms, who.incarnation, message))

    def ended(
        self, who: WorkerInfo, submit: Submit, reason: EndReason, text: str = "because"
    ) -> list[RouterAction]:
        message = PartEnded(submit.key, reason, text)
        return self.did(self.core.from_worker(self.now_ms, who.incarnation, message))

    def pulled(self, who: WorkerInfo, owner: WorkerInfo, submit: Submit) -> list[RouterAction]:
        report = TransferReport(submit.key, owner.incarnation, (), 1, 2, 3)
        return self.did(self.core.from_worker(self.now_ms, who.incarnation, report))

    def lost(self, who: WorkerInfo) -> list[RouterAction]:
        return self.did(self.core.session_lost(self.now_ms, who.incarnation))

    def holds(self, who: WorkerInfo, token_ids: tuple[int, ...], *, groups: int = 2) -> None:
        """Tell the router that all blocks of these tokens are cached there."""
        stored = [BlocksStored(g, hashes_of(token_ids), None, 0, 4) for g in range(groups)]
        start = self.core.kv_sequence(who.incarnation)
        epoch = who.incarnation.epoch
        assert self.core.kv_events(who.incarnation, epoch, start, None, stored)

    def tier_holds(
        self, who: WorkerInfo, token_ids: tuple[int, ...], *, tier: int = 0, groups: int = 2
    ) -> None:
        """Tell the router that a tier of the worker has all blocks of these tokens."""
        stored = [TierStored(tier, g, hashes_of(token_ids)) for g in range(groups)]
        start = self.core.kv_sequence(who.incarnation)
        epoch = who.incarnation.epoch
        assert self.core.kv_events(who.incarnation, epoch, start, None, stored)

    @property
    def submits(self) -> list[tuple[str, Submit]]:
        return [
            (a.worker.worker_id, a.message)
            for a in self.actions
            if isinstance(a, ToWorker) and isinstance(a.message, Submit)
        ]

    @property
    def cancels(self) -> list[tuple[str, int]]:
        return [
            (a.worker.worker_id, a.message.key.generation)
            for a in self.actions
            if isinstance(a, ToWorker) and isinstance(a.message, Cancel)
        ]

    @property
    def delivered(self) -> list[int]:
        return [t for a in self.actions if isinstance(a, Deliver) for t in a.token_ids]

    @property
    def finish(self) -> list[FinishReason]:
        return [a.finish_reason for a in self.actions if isinstance(a, Deliver) and a.finish_reason]

    @property
    def error(self) -> DisaggError:
        (error,) = (a.error for a in self.actions if isinstance(a, Fail))
        return error

    def record(self, request_id: str) -> RequestRecord:
        record = self.core.record(request_id)
        assert record is not None
        return record

    @property
    def disconnected(self) -> list[Incarnation]:
        return [a.worker for a in self.actions if isinstance(a, Disconnect)]
