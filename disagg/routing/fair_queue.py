"""Who goes next when requests wait: tenants by the tokens they have been served, not by number."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from disagg.errors import ConfigError

WEIGHT_MIN, WEIGHT_MAX = 0.001, 1000.0
_Item = TypeVar("_Item")
_Turn = tuple[int, int, str]
"""Priority, number of arrival, key: who goes before whom in the queue of one tenant."""


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
class _Waiting(Generic[_Item]):
    turn: _Turn
    kind: object
    item: _Item


@dataclass(slots=True)
class _Tenant(Generic[_Item]):
    virtual: float
    """Tokens served per weight; a tenant that comes back starts at the queue's virtual time."""
    items: dict[str, _Waiting[_Item]] = field(default_factory=dict)
    """By key."""
    turns: dict[object, list[_Turn]] = field(default_factory=dict)
    """By kind those of the items that are not aside, sorted; none is empty."""
    aside: list[_Turn] = field(default_factory=list)
    """The others, sorted."""

    @property
    def first(self) -> _Turn:
        """Who goes first of all that wait."""
        return min(self._heads())

    @property
    def last(self) -> _Item:
        """Who goes last of all that wait."""
        *_, key = max([turns[-1] for turns in self.turns.values()] + self.aside[-1:])
        return self.items[key].item

    def push(self, one: _Waiting[_Item]) -> None:
        """Let an item wait."""
        self.items[one.turn[-1]] = one
        self._put(one)

    def pop(self, key: str) -> _Item:
        """Take an item that waits out."""
        one = self.items.pop(key)
        if not _remove(self.aside, one.turn):
            self._take(one)
        return one.item

    def set_aside(self, key: str, is_aside: bool) -> None:
        """Put an item aside, or back in its place."""
        one = self.items[key]
        if _remove(self.aside, one.turn):
            self._put(one)
        if is_aside:
            self._take(one)
            insort(self.aside, one.turn)

    def sort(self, kind_of: Callable[[_Item], object]) -> None:
        """Tell the kinds of all items anew."""
        self.turns = {}
        aside = {key for *_, key in self.aside}
        for key, one in self.items.items():
            one.kind = kind_of(one.item)
            if key not in aside:
                self._put(one)

    def is_first(self, key: str) -> bool:
        """Whether an item that waits is the first of its kind, or of those aside."""
        one = self.items[key]
        return one.turn in (*self.turns.get(one.kind, ())[:1], *self.aside[:1])

    def firsts(self) -> list[_Item]:
        """Of each kind the first item, and of those aside the first, who goes first first."""
        return [self.items[key].item for *_, key in sorted(self._heads())]

    def _heads(self) -> list[_Turn]:
        return [turns[0] for turns in self.turns.values()] + self.aside[:1]

    def _put(self, one: _Waiting[_Item]) -> None:
        insort(self.turns.setdefault(one.kind, []), one.turn)

    def _take(self, one: _Waiting[_Item]) -> None:
        turns = self.turns[one.kind]
        _remove(turns, one.turn)
        if not turns:
            del self.turns[one.kind]


class FairQueue(Generic[_Item]):
    """Start-time fair queueing whose costs are charged as they become known.

    Each tenant has a virtual time: its tokens divided by its weight. The tenant with the least goes
    first, and of its items the one with the lowest priority, of those the one that came first.
    Virtual time of the whole is that of the tenant that went last; a tenant without waiting items
    is raised to it when it comes again, so that nobody saves up turns, and nobody pays for what
    others did before it came. (Start-time fair queueing: Goyal, Vin, Cheng 1996. Charging what was
    served, since nobody knows how long an answer will be: Sheng et al., Fairness in Serving Large
    Language Models, OSDI 2024.)

    Args:
        weights: by tenant; 1 where there is none.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._tenants: dict[str, _Tenant[_Item]] = {}
        self._virtual = 0.0
        self._num_arrived = 0

    def __len__(self) -> int:
        return sum(len(tenant.items) for tenant in self._tenants.values())

    def __iter__(self) -> Iterator[_Item]:
        for tenant in self._tenants.values():
            for one in tenant.items.values():
                yield one.item

    def num_waiting(self, name: str) -> int:
        """Items of one tenant that wait."""
        tenant = self._tenants.get(name)
        return len(tenant.items) if tenant is not None else 0

    def push(
        self, name: str, key: str, item: _Item, priority: int = 0, kind: object = None
    ) -> bool:
        """Let an item wait behind its tenant's others up to this priority.

        Args:
            name: of the tenant.
            key: of the item, unique.
            item: what waits.
            priority: the lowest goes first.
            kind: of the item: one kind that cannot go on does not hold others up.

        Returns:
            Whether it is the first of its kind.
        """
        self._num_arrived += 1
        tenant = self._tenants.get(name)
        if tenant is None:
            self._forget()
            tenant = self._tenants[name] = _Tenant(self._virtual)
        elif not tenant.items:
            tenant.virtual = max(tenant.virtual, self._virtual)
        tenant.push(_Waiting((priority, self._num_arrived, key), kind, item))
        return tenant.is_first(key)

    def is_first(self, name: str, key: str) -> bool:
        """Whether an item that waits is the first of its kind, or of those aside."""
        return self._tenants[name].is_first(key)

    def sort(self, kind_of: Callable[[_Item], object]) -> None:
        """Tell the kinds of all that wait anew."""
        for tenant in self._tenants.values():
            tenant.sort(kind_of)

    def set_aside(self, name: str, key: str, is_aside: bool = True) -> None:
        """Let an item that waits hold up no other of its tenant, or again be one as the others."""
        self._tenants[name].set_aside(key, is_aside)

    def heads(self) -> list[tuple[str, _Item]]:
        """Of each tenant the first item of every kind, and the first of those that are aside.

        Who goes first is first, tenant by tenant.
        """
        order = sorted(
            (tenant.virtual, tenant.first[1], name)
            for name, tenant in self._tenants.items()
            if tenant.items
        )
        return [(name, item) for *_, name in order for item in self._tenants[name].firsts()]

    def take(self, name: str, num_tokens: int, key: str | None = None) -> _Item:
        """Take a tenant's first item, or that of a key, out to be served; charge what is known."""
        tenant = self._tenants[name]
        item = tenant.pop(tenant.first[-1] if key is None else key)
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
        return tenant.pop(key) if tenant is not None and key in tenant.items else None

    def last(self, name: str) -> _Item:
        """Who goes last of a tenant's waiting items: the newest of the highest priority."""
        return self._tenants[name].last

    def longest(self) -> str | None:
        """The tenant with the most waiting items per weight; None where nothing waits."""
        waiting = [name for name, tenant in self._tenants.items() if tenant.items]
        return max(
            waiting,
            key=lambda name: (self.num_waiting(name) / self._weights.get(name, 1.0), name),
            default=None,
        )

    def is_longer(self, name: str, other: str, num: int = 1) -> bool:
        """Whether one tenant's queue, by weight, is longer than another's as items change places.

        With the last one of ``num`` items still to be given up, and the other's already there.
        """
        ours, theirs = self._weights.get(name, 1.0), self._weights.get(other, 1.0)
        left = self.num_waiting(name) - (num - 1)
        return left / ours > (self.num_waiting(other) + num) / theirs

    def _forget(self) -> None:
        """Drop tenants that would begin where they stand anyway."""
        idle = [
            name
            for name, tenant in self._tenants.items()
            if not tenant.items and tenant.virtual <= self._virtual
        ]
        for name in idle:
            del self._tenants[name]


def _remove(turns: list[_Turn], turn: _Turn) -> bool:
    place = bisect_left(turns, turn)
    if turns[place : place + 1] != [turn]:
        return False
    del turns[place]
    return True
