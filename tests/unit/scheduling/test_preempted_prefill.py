"""A prefill that lost its blocks reserves and leases anew."""

from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.shapes.layout import plan_layout
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import Reserve, Reserved
from disagg.messages.sampling import SamplingParams
from disagg.messages.session import EndReason, PartEnded
from disagg.messages.submit import PeerAddress, Role, Submit
from disagg.scheduling.actions import ToRouter, WorkerAction
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.limits import WorkerLimits
from disagg.scheduling.step import StepResult
from disagg.testing.simulation.worker_faults import preempt_youngest
from disagg.transfer.actions import Send

ME, READER = Incarnation("p", "e1"), Incarnation("d", "e2")
KEY = RequestKey("r", 1)
LEASE_TTL_MS = 1_000
LIMITS = WorkerLimits(
    max_model_tokens=32,
    max_step_tokens=4,
    max_sequences=2,
    max_waiting=2,
    handover_share_max=1.0,
    reserve_timeout_ms=100,
    reserve_passes_max=3,
    reservation_ttl_ms=5_000,
    lease_ttl_ms=LEASE_TTL_MS,
    committed_max=2,
    commit_repeat_ms=50,
    read_stuck_ms=1_000,
    blocks_per_read_max=4,
    quarantine_share_max=1.0,
)


def prefills_again() -> WorkerCore:
    """Preempted after its first step, and granted another reservation before the next tick."""
    layout = plan_layout([FullAttentionSpec(4, 1, 8, 4)])
    kv = KVCacheCoordinator(layout, 16, max_model_tokens=32, max_step_tokens=4)
    core = WorkerCore(ME, layout, kv, BlockHasher(b"key", 4), LIMITS, lambda _: 1)
    peer = PeerAddress(READER, "host:1")
    core.on_router_message(
        0, Submit(KEY, Role.PREFILL, tuple(range(10)), (), b"", SamplingParams(2), peer)
    )
    for number in (1, 2):
        _, asked = core.next_step(0)
        assert Send(READER, Reserve(KEY, number)) in asked
        core.on_peer_message(0, READER, Reserved(KEY, number, True, "", (0,)))
        step, _ = core.next_step(0)
        assert step is not None
        if number == 1:
            core.on_step_done(0, StepResult(step.step_id, (None,)))
            preempt_youngest(core)
    return core


def ends(actions: list[WorkerAction]) -> list[EndReason]:
    told = [one.message for one in actions if isinstance(one, ToRouter)]
    return [message.reason for message in told if isinstance(message, PartEnded)]


def test_the_end_of_its_first_lease_does_not_end_it() -> None:
    core = prefills_again()
    assert not ends(core.tick(1))
    assert KEY in core.sequences
    assert core.leases.num_live == 1


def test_the_end_of_its_second_lease_does() -> None:
    core = prefills_again()
    assert ends(core.tick(LEASE_TTL_MS)) == [EndReason.LEASE_DEAD]
    assert KEY not in core.sequences
