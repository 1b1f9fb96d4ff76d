"""What kind of world a simulation plays; the seed picks one of them."""

from dataclasses import dataclass

from disagg.kv.layout import KVCacheLayout


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """Sizes, load and faults of one family of worlds."""

    layout: KVCacheLayout
    roles: tuple[str, ...] = ("prefill", "decode")
    num_blocks: int = 64
    num_requests: int = 20
    prompt_tokens_max: int = 60
    output_tokens_max: int = 12
    num_kills: int = 0
    num_cuts: int = 0
    num_cancels: int = 0
    continued_per_mille: int = 0
    """Requests that go on after an earlier one's answer."""
    pull_tokens_min: int = 8
    wild_pulls_per_mille: int = 0
    """Prefills that are sent to pull from anybody, whatever is there."""
    read_errors_per_mille: int = 0
    read_ms_max: int = 30
    step_ms_max: int = 10
    lease_ttl_ms: int = 60_000
    time_limit_ms: int = 300_000
