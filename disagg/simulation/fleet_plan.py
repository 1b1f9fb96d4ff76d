"""What fleet is simulated: workers by role, their limits, the router's options."""

from dataclasses import dataclass, field, replace

from disagg.kv.blocks.cache_policy import CachePolicy
from disagg.routing.policy.protocol import PolicyOptions
from disagg.routing.policy.registry import DEFAULT_POLICY
from disagg.routing.slo import NO_SLO, Slo
from disagg.scheduling.limits import WorkerLimits
from disagg.simulation.curves import Curves


def roles_name(num_prefill: int, num_decode: int, num_both: int) -> str:
    """As 2P6D, with 1B behind it for one of both roles."""
    parts = ((num_prefill, "P"), (num_decode, "D"), (num_both, "B"))
    return "".join(f"{number}{role}" for number, role in parts if number)


@dataclass(frozen=True, slots=True)
class RouterPlan:
    """The routers' part, by the names of their settings."""

    policy: str = DEFAULT_POLICY
    options: PolicyOptions = PolicyOptions()  # noqa: RUF009 (frozen)
    replans_max: int = 3
    requests_max: int = 1024
    request_timeout_ms: int = 600_000
    worker_prefill_tokens_max: int = 16_384
    worker_waiting_max: int = 16
    num_routers: int = 1
    """That go by this and share the requests."""


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """One fleet.

    Attributes:
        curves: of each worker and of the links.
        limits: of each worker.
        num_prefill: workers by role.
        num_decode: likewise.
        num_both: likewise.
        router: its options.
        slo: of every request.
        cache: what workers keep of prefixes.
        reserve_retry_ms: least and most delay after a refused reservation, see ``transfer``.
    """

    curves: Curves = field(repr=False)
    limits: WorkerLimits
    num_prefill: int
    num_decode: int
    num_both: int = 0
    router: RouterPlan = RouterPlan()
    slo: Slo = NO_SLO
    cache: CachePolicy = CachePolicy(eviction="segmented_lru")  # noqa: RUF009 (frozen)
    reserve_retry_ms: tuple[int, int] = (5, 60)

    @property
    def roles(self) -> tuple[str, ...]:
        """Of every worker, in the order of their numbers."""
        return (
            ("prefill",) * self.num_prefill
            + ("decode",) * self.num_decode
            + ("both",) * self.num_both
        )

    @property
    def roles_name(self) -> str:
        """As 2P6D, with 1B behind it for one of both roles."""
        return roles_name(self.num_prefill, self.num_decode, self.num_both)

    def with_policy(self, policy: str) -> "FleetPlan":
        """The same fleet under another policy."""
        return replace(self, router=replace(self.router, policy=policy))

    def with_ratio(self, num_prefill: int, num_decode: int) -> "FleetPlan":
        """The same workers with other roles."""
        return replace(self, num_prefill=num_prefill, num_decode=num_decode, num_both=0)
