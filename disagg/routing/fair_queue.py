"""Who goes next when requests wait: tenants by the tokens they have been served, not by number."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from disagg.errors import ConfigError

WEIGHT_MIN, WEIGHT_MAX = 0.001, 1000.0
_Item = TypeVar("_Item")


def parse_weights(given: Sequence[str]) -> dict[str, float]:
    """Weights by tenant, from ``NAME=WEIGHT`` each.

    Raises:
        ConfigError: one is not of that form, out of bounds, or given twice.
    """
    weights: dict[str, float] = {}
    for text in given:
        name, _, number = text.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        if not name or not WEIGHT_MIN <= weight <= WEIGHT_MAX:
            raise ConfigError(
                f"{text!r} is not NAME=WEIGHT with a weight from {WEIGHT_MIN:g} to {WEIGHT_MAX:g}"
            )
        if name in weights:
            raise ConfigError(f"{name!r} is given twice")
        weights[name] = weight
    return weights


@dataclass(slots=True)
class _Tenant(Generic[_Item]):
    virtual: float
    """Tokens served per weight; a tenant that comes back starts at the queue's virtual time."""
    waiting: dict[str, tuple[int, _Item]] = field(default_factory=dict)
    """By key, in order of arrival: its number, and the item."""


class FairQueue(Generic[_Item]):
    """Start-time fair queueing whose costs are charged as they become known.

    Each tenant has a virtual time: its tokens divided by its weight. The tenant with the least goes
    first, and of its items the one that came first. Virtual time of the whole is that of the tenant
    that went last; a tenant without waiting items is raised to it when it comes again, so that
    nobody saves up turns, and nobody pays for what others did before it came. (Start-time fair
    queueing: Goyal, Vin, Cheng 1996. Charging what was served, since nobody knows how long an
    answer will be: Sheng et al., Fairness in Serving Large Language Models, OSDI 2024.)

    Args:
        weights: by tenant; 1 where there is none.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._tenants: dict[str, _Tenant[_Item]] = {}
        self._virtual = 0.0
        self._num_arrived = 0

    def __len__(self) -> int:
        return sum(len(tenant.waiting) for tenant in self._tenants.values())

    def __iter__(self) -> Iterator[_Item]:
        for tenant in self._tenants.values():
            for _, item in tenant.waiting.values():
                yield item

    def num_waiting(self, name: str) -> int:
        """Items of one tenant that wait."""
        tenant = self._tenants.get(name)
        return len(tenant.waiting) if tenant is not None else 0

    def virtual(self, name: str) -> float:
        """The virtual time at which a tenant stands."""
        tenant = self._tenants.get(name)
        return self._virtual if tenant is None else tenant.virtual

    def push(self, name: str, key: str, item: _Item) -> None:
        """Let an item wait behind its tenant's others; keys are unique."""
        self._num_arrived += 1
        tenant = self._tenants.get(name)
        if tenant is None:
            self._forget()
            tenant = self._tenants[name] = _Tenant(self._virtual)
        elif not tenant.waiting:
            tenant.virtual = max(tenant.virtual, self._virtual)
        tenant.waiting[key] = (self._num_arrived, item)

    def heads(self) -> list[tuple[str, _Item]]:
        """The first item of each tenant that has any, who goes first first."""
        order = sorted(
            (tenant.virtual, *next(iter(tenant.waiting.values()))[:1], name)
            for name, tenant in self._tenants.items()
            if tenant.waiting
        )
        return [(name, next(iter(self._tenants[name].waiting.values()))[1]) for *_, name in order]

    def take(self, name: str, num_tokens: int) -> _Item:
        """Take a tenant's first item out to be served, and charge what it is known to cost."""
        tenant = self._tenants[name]
        _, item = tenant.waiting.pop(next(iter(tenant.waiting)))
        # Who is passed over because its workers are full keeps its place, and moves no clock back.
        self._virtual = max(self._virtual, tenant.virtual)
        self.charge(name, num_tokens)
        return item

    def charge(self, name: str, num_tokens: int) -> None:
        """Add tokens that a tenant was served."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(self._virtual)
        tenant.virtual += num_tokens / self._weights.get(name, 1.0)

    def remove(self, name: str, key: str) -> _Item | None:
        """Take an item out that will not be served; None when it does not wait."""
        tenant = self._tenants.get(name)
        found = tenant.waiting.pop(key, None) if tenant is not None else None
        return None if found is None else found[1]

    def newest(self, name: str) -> _Item:
        """The last of a tenant's waiting items."""
        return next(reversed(self._tenants[name].waiting.values()))[1]

    def longest(self) -> str | None:
        """The tenant with the most waiting items per weight; None where nothing waits."""
        waiting = [name for name, tenant in self._tenants.items() if tenant.waiting]
        return max(
            waiting,
            key=lambda name: (self.num_waiting(name) / self._weights.get(name, 1.0), name),
            default=None,
        )

    def is_longer(self, name: str, other: str) -> bool:
        """Whether one tenant's queue, by weight, is longer than the other's with one item more."""
        ours, theirs = self._weights.get(name, 1.0), self._weights.get(other, 1.0)
        return self.num_waiting(name) / ours > (self.num_waiting(other) + 1) / theirs

    def _forget(self) -> None:
        """Drop tenants that would begin where they stand anyway."""
        idle = [
            name
            for name, tenant in self._tenants.items()
            if not tenant.waiting and tenant.virtual <= self._virtual
        ]
        for name in idle:
            del self._tenants[name]
