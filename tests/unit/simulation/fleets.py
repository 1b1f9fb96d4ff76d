"""Small fleets with curves made by hand."""

from dataclasses import replace

from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.shapes.layout import KVCacheLayout, plan_layout
from disagg.routing.estimates.place import LinkCost
from disagg.scheduling.limits import STEPS_MAX, WorkerLimits
from disagg.simulation.curves import Curves, Line, Surface
from disagg.simulation.fleet_plan import FleetPlan, RouterPlan

PREFILL = Surface((1, 64, 512), (0, 4096), ((10, 11), (12, 13), (40, 50)))
DECODE = Surface((1, 8, 32), (64, 4096), ((10, 11), (11, 15), (14, 30)))


def layout() -> KVCacheLayout:
    window = SlidingWindowSpec(16, 2, 16, 2, 64)
    full = FullAttentionSpec(16, 2, 16, 2)
    return plan_layout([window, window, full])


def curves() -> Curves:
    return Curves(
        prefill=PREFILL,
        decode=DECODE,
        shared_ms=9.0,
        link=LinkCost(1.0, 2.0),
        hop_ms=0.5,
        request=Line((0,), (3.0,)),
        layout=layout(),
        num_blocks=4_000,
        max_model_tokens=8_192,
        name="by hand",
    )


def limits() -> WorkerLimits:
    return WorkerLimits(
        max_model_tokens=8_192,
        max_step_tokens=512,
        max_sequences=32,
        max_waiting=1_024,
        handover_share_max=0.5,
        reserve_timeout_ms=2_000,
        reserve_passes_max=20,
        reservation_ttl_ms=120_000,
        lease_ttl_ms=60_000,
        take_over_ms=2_000,
        committed_max=1_024,
        commit_repeat_ms=500,
        read_stuck_ms=10_000,
        blocks_per_read_max=4_096,
        quarantine_share_max=0.05,
        steps_max=STEPS_MAX,
        drain_ms=5_000,
    )


def fleet(num_prefill: int = 1, num_decode: int = 1, policy: str = "prefix_then_load") -> FleetPlan:
    return FleetPlan(curves(), limits(), num_prefill, num_decode, router=RouterPlan(policy))


def with_curves(plan: FleetPlan, **changes: object) -> FleetPlan:
    return replace(plan, curves=replace(plan.curves, **changes))  # type: ignore[arg-type]


def with_routers(plan: FleetPlan, num_routers: int) -> FleetPlan:
    return replace(plan, router=replace(plan.router, num_routers=num_routers))
