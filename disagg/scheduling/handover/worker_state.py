"""What the sides of a hand-over and the core of a worker work on together."""

from collections.abc import Sequence
from dataclasses import dataclass

from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.prefix_sharing import PrefixSharing
from disagg.kv.transfer_plan import Blocks
from disagg.messages.identity import Incarnation, RequestKey
from disagg.scheduling.actions import Actions
from disagg.scheduling.batcher import Batcher
from disagg.scheduling.generations import Generations
from disagg.scheduling.handover.budget import HandoverBudget
from disagg.scheduling.handover.inbound_admission import InboundAdmission
from disagg.scheduling.limits import Counters, WorkerLimits
from disagg.transfer.checksums import Checksums
from disagg.transfer.owner.requests import LeaseAnswers
from disagg.transfer.owner.table import LeaseTable
from disagg.transfer.read_plan import ReadPlan
from disagg.transfer.reader.parts import Parts, parts_of
from disagg.transfer.reader.requests import LeaseRequests
from disagg.transfer.reader.table import InboundTable


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker's memory, bounds, queue, register and transfer tables.

    Attributes:
        kv: its KV cache.
        prefixes: what of it can be pulled, and pulled into.
        limits: its bounds.
        counters: what it counts.
        out: what it wants done.
        budget: how much of the memory hand-overs may take.
        batcher: its queue and batch.
        generations: what it has a part in.
        admission: whether more may come from elsewhere.
        leases: what it holds for readers.
        lease_answers: requests of readers that it has answered.
        inbound: what it reads from owners.
        lease_requests: its requests to owners.
        plans: how blocks of the owners that are not like this worker are read.
        checksums: those of this worker's blocks that are being computed.
    """

    kv: KVCacheCoordinator
    prefixes: PrefixSharing
    limits: WorkerLimits
    counters: Counters
    out: Actions
    budget: HandoverBudget
    batcher: Batcher
    generations: Generations
    admission: InboundAdmission
    leases: LeaseTable
    lease_answers: LeaseAnswers
    inbound: InboundTable
    lease_requests: LeaseRequests
    plans: dict[Incarnation, ReadPlan]
    checksums: Checksums

    def parts_from(
        self,
        owner: Incarnation,
        key: RequestKey,
        num_tokens: int,
        lacks: Blocks,
        first_lacked: Sequence[int],
    ) -> Parts | None:
        """What is read of each of an owner's blocks; None: whole ones, of an owner with equal ones.

        Blocks of the sequence that are not filled by it are withheld from the prefix cache.
        """
        plan = self.plans.get(owner)
        if plan is None:
            return None
        parts = parts_of(plan, self.kv.managers, num_tokens, lacks, first_lacked)
        for manager, num_blocks in zip(self.kv.managers, parts.unfilled, strict=True):
            manager.withhold(key, num_blocks)
        return parts


def create_state(
    me: Incarnation, kv: KVCacheCoordinator, hasher: BlockHasher, limits: WorkerLimits
) -> WorkerState:
    """The state of a worker that has just started."""
    counters, out = Counters(), Actions()
    batcher = Batcher(kv, limits)
    generations = Generations(kv, hasher, limits, batcher, counters, out)
    checksums = Checksums(out, limits.blocks_per_read_max)
    compared = checksums if limits.checksums else None
    leases = LeaseTable(
        me,
        kv.pool,
        out,
        ttl_ms=limits.lease_ttl_ms,
        committed_max=limits.committed_max,
        take_over_ms=limits.take_over_ms,
        checksums=compared,
    )
    inbound = InboundTable(
        me,
        kv.pool,
        out,
        commit_repeat_ms=limits.commit_repeat_ms,
        ask_repeat_ms=limits.commit_repeat_ms,
        read_stuck_ms=limits.read_stuck_ms,
        blocks_per_read_max=limits.blocks_per_read_max,
        progress_ms=limits.progress_ms,
        checksums=compared,
    )
    return WorkerState(
        kv=kv,
        prefixes=PrefixSharing(kv),
        limits=limits,
        counters=counters,
        out=out,
        budget=HandoverBudget(int(limits.handover_share_max * kv.num_usable_blocks)),
        batcher=batcher,
        generations=generations,
        admission=InboundAdmission(kv, batcher, generations, inbound, limits),
        leases=leases,
        lease_answers=LeaseAnswers(leases, limits.committed_max),
        inbound=inbound,
        lease_requests=LeaseRequests(
            inbound,
            out,
            timeout_ms=limits.reserve_timeout_ms,
            ttl_ms=limits.reservation_ttl_ms,
            repeat_ms=limits.commit_repeat_ms,
        ),
        plans={},
        checksums=checksums,
    )
