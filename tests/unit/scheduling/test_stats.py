"""What a worker reports of its load: a request counts from its arrival, wherever it stands."""

from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.shapes.layout import plan_layout
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import Reserved
from disagg.messages.sampling import SamplingParams
from disagg.messages.session import Cancel
from disagg.messages.submit import PeerAddress, Role, Submit
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.stats import worker_stats
from tests.unit.scheduling.test_block_tables import new_core

PEER = Incarnation("x", "1")
KEY = RequestKey("r", 1)


def core_with(role: Role) -> WorkerCore:
    core = new_core(plan_layout([FullAttentionSpec(4, 1, 8, 4)]), 100)
    address = PeerAddress(PEER, "host:1")
    core.on_router_message(0, Submit(KEY, role, (1, 2, 3), (), b"", SamplingParams(2), address))
    return core


def test_a_prefill_counts_while_its_reservation_is_requested_and_after_a_refusal() -> None:
    core = core_with(Role.PREFILL)
    assert worker_stats(core).num_prefill_tokens_queued == 3
    core.next_step(0)
    assert list(core.prefill_side.reserving) == [KEY]
    assert worker_stats(core).num_prefill_tokens_queued == 3
    core.on_peer_message(0, PEER, Reserved(KEY, 1, granted=False, reason=""))
    assert not core.prefill_side.reserving
    assert worker_stats(core).num_prefill_tokens_queued == 3


def test_a_decode_counts_before_its_reservation_comes() -> None:
    assert worker_stats(core_with(Role.DECODE)).num_waiting == 1


def test_nothing_is_queued_at_the_end() -> None:
    core = core_with(Role.PREFILL)
    core.on_router_message(0, Cancel(KEY, "gone"))
    stats = worker_stats(core)
    assert (stats.num_waiting, stats.num_prefill_tokens_queued) == (0, 0)
