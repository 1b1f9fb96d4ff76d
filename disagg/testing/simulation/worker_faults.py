"""What can happen to a whole worker at any moment, done to the production core."""

from disagg.messages.submit import Role
from disagg.scheduling.actions import WorkerAction
from disagg.scheduling.core import WorkerCore


def preempt_youngest(core: WorkerCore) -> list[WorkerAction]:
    """Lack of memory took the youngest's blocks, as in `Batcher.build_step` and after it."""
    if not core.batcher.running:
        return []
    victim = max(core.batcher.running, key=lambda seq: seq.arrival)
    core.batcher.preempt(victim)
    if victim.role is Role.PREFILL:
        core.prefill_side.give_back(victim, "preempted")
    else:
        victim.preempted = True
    core.parts.queue(victim)
    return core._out.take()


def expire_leases(core: WorkerCore, now_ms: int) -> None:
    """The time to live of all leases is over; the next tick ends them."""
    for status in core.leases.statuses():
        lease = core.leases.find(status.lease_id)
        assert lease is not None
        lease.expires_ms = now_ms
