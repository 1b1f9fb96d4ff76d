"""How many workers of each role are wanted; no I/O."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from disagg.config import Settings
from disagg.errors import ConfigError

COUNT_MAX = 1024
"""Of one role."""
BY_SETTINGS, BY_HAND, BY_LOAD = "settings", "disagg scale", "autoscale"


@dataclass(frozen=True, slots=True)
class Counts:
    """Workers by role.

    Raises:
        ConfigError: a count is out of range, or there is no worker at all.
    """

    prefill: int
    decode: int
    both: int = 0

    def __post_init__(self) -> None:
        for role, count in self.by_role.items():
            if type(count) is not int or not 0 <= count <= COUNT_MAX:
                raise ConfigError(
                    f"{role}: {count!r} is no number from 0 to {COUNT_MAX}", param=role
                )
        if not sum(self.by_role.values()):
            raise ConfigError("there must be at least one worker", param="prefill")

    def __str__(self) -> str:
        return ", ".join(f"{role} {count}" for role, count in self.by_role.items() if count)

    @property
    def by_role(self) -> dict[str, int]:
        """Counts by the roles' names."""
        return asdict(self)

    @classmethod
    def of_settings(cls, settings: Settings) -> "Counts":
        """As the settings have them."""
        cluster = settings.cluster
        return cls(cluster.num_prefill, cluster.num_decode, cluster.num_both)

    def into(self, settings: Settings) -> Settings:
        """The same settings with these counts."""
        counted = {f"num_{role}": count for role, count in self.by_role.items()}
        return settings.model_copy(update={"cluster": settings.cluster.model_copy(update=counted)})


@dataclass(frozen=True, slots=True)
class Wish:
    """Counts that hold instead of those in the settings.

    Attributes:
        counts: so many workers.
        by_hand: an operator wants them; else the automatic mode, which leaves the former alone.
    """

    counts: Counts
    by_hand: bool

    def to_bytes(self) -> bytes:
        """As it is kept in the cluster."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Wish":
        """From what is kept.

        Raises:
            ConfigError: it is nothing of the kind.
        """
        try:
            found = json.loads(data)
            return cls(Counts(**found["counts"]), found["by_hand"] is True)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"what disagg scale has left cannot be read: {error!r}") from None


@dataclass(frozen=True, slots=True)
class Fleet:
    """What the supervisor says of its workers.

    Attributes:
        counts: that it brings about.
        by: who wants them: `BY_SETTINGS`, `BY_HAND` or `BY_LOAD`.
        roles: that it wants of each worker, by id.
        serving: role by id, of the workers that serve.
        waiting: why not, by id, of workers that are wanted and do not serve, or that no router has.
    """

    counts: Counts
    by: str
    roles: Mapping[str, str]
    serving: Mapping[str, str]
    waiting: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether the workers that serve are those that are wanted."""
        return dict(self.roles) == dict(self.serving)

    def count_serving(self) -> str:
        """How many serve, by role."""
        found = Counter(self.serving.values())
        return ", ".join(f"{role} {count}" for role, count in sorted(found.items())) or "none"

    def describe(self) -> str:
        """Wanted and present, in a line, who is on the way, and why who waits does so."""
        lines = [f"wanted, by {self.by}: {self.counts}", f"serving: {self.count_serving()}"]
        for worker_id, role in sorted(self.roles.items()):
            has = self.serving.get(worker_id)
            if has != role:
                why = f": {self.waiting[worker_id]}" if worker_id in self.waiting else ""
                does = "takes the role" if has else "is to serve as"
                lines.append(f"{worker_id} {does} {role}{why}")
            elif worker_id in self.waiting:
                lines.append(f"{worker_id}: {self.waiting[worker_id]}")
        lines += [f"{one} leaves" for one in sorted(self.serving.keys() - self.roles.keys())]
        return "; ".join(lines)

    def is_of(self, wish: "Wish | None") -> bool:
        """Whether the supervisor has taken up what is wanted by hand; None: no more by hand."""
        if wish is None:
            return self.by != BY_HAND
        return self.by == BY_HAND and self.counts == wish.counts

    def to_bytes(self) -> bytes:
        """As it is kept in the cluster."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Fleet":
        """From what is kept.

        Raises:
            ConfigError: it is nothing of the kind.
        """
        try:
            found = json.loads(data)
            roles, serving = dict(found["roles"]), dict(found["serving"])
            waiting = dict(found.get("waiting", {}))  # older supervisors do not say
            return cls(Counts(**found["counts"]), str(found["by"]), roles, serving, waiting)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"what the supervisor has left cannot be read: {error!r}") from None
