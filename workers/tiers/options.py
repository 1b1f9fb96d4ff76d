"""A tier as a setting names it: one line of text, such as ``disk:/var/cache/kv?size=200GiB``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args
from urllib.parse import parse_qsl

from disagg.errors import ConfigError
from disagg.kv.shapes.memory_plan import parse_memory

PARAM = "worker.tiers"
WritePolicy = Literal["publish", "eviction", "reuse"]
"""When a block is written: as soon as it can be found, shortly before the pool gives it up, or once
a second prompt has found it (never for prompts seen once)."""
EvictionPolicy = Literal["lru", "fifo"]
"""Which block a full tier gives up: the least recently used one, or the one written first."""
TIERS_MAX = 8
"""Of a worker."""
THREADS_MAX = 64


@dataclass(frozen=True, slots=True)
class TierOptions:
    """One tier of a worker.

    Attributes:
        kind: names how it is opened: ``host``, ``disk``, ``object``, or another package's.
        name: the kind, unless the setting says ``name``.
        place: a directory, a URL, or "" where the kind has none.
        capacity_bytes: how many bytes of blocks it keeps at most.
        write: when blocks are written to it.
        eviction: what it gives up when it is full.
        num_threads: that copy to and from it.
        slow_ms: a tier from which nothing comes for so long is not waited for.
        others: options by name that only the kind itself knows.
    """

    kind: str
    name: str
    place: str
    capacity_bytes: int
    write: WritePolicy = "publish"
    eviction: EvictionPolicy = "lru"
    num_threads: int = 2
    slow_ms: int = 2_000
    others: Mapping[str, str] = field(default_factory=dict)

    def share_of(self, num_ranks: int) -> "TierOptions":
        """What one rank of several gets of it: an equal share of the bytes, a store of its own."""
        return replace(self, capacity_bytes=self.capacity_bytes // num_ranks)

    def refuse_others(self, *known: str) -> None:
        """Raise for options that the kind does not know.

        Raises:
            ConfigError: naming the first of them.
        """
        for name in self.others:
            if name not in known:
                raise ConfigError(
                    f"{PARAM}: {name} is no option of a {self.kind} tier "
                    f"(known: {', '.join(sorted((*_READERS, *known)))})",
                    param=PARAM,
                )


def parse_tiers(texts: tuple[str, ...]) -> tuple[TierOptions, ...]:
    """The tiers of a worker, fastest first.

    Raises:
        ConfigError: a text is no tier, or two have the same name.
    """
    if len(texts) > TIERS_MAX:
        raise ConfigError(f"{PARAM}: {len(texts)} tiers, at most {TIERS_MAX}", param=PARAM)
    tiers = tuple(parse_tier(text) for text in texts)
    names = [tier.name for tier in tiers]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"{PARAM}: two tiers are called {name!r}; tell them apart with name=", param=PARAM
            )
    return tiers


def parse_tier(text: str) -> TierOptions:
    """One tier: ``KIND[:PLACE]?size=SIZE[&OPTION=VALUE...]``.

    Raises:
        ConfigError: the text is no tier; the message says what is wrong with it.
    """
    head, _, query = text.strip().partition("?")
    kind, _, place = head.partition(":")
    if not kind.replace("_", "").replace("-", "").isalnum():
        raise _bad(text, "expected KIND[:PLACE]?size=SIZE, such as host?size=8GiB")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise _bad(text, "options are NAME=VALUE with & between them") from None
    given: dict[str, object] = {}
    others: dict[str, str] = {}
    for name, value in pairs:
        if name in given or name in others:
            raise _bad(text, f"{name} is given twice")
        if (read := _READERS.get(name)) is None:
            others[name] = value
            continue
        try:
            given[name] = read(value)
        except (ValueError, ConfigError):
            raise _bad(text, f"{name}={value} is not {_EXPECTED[name]}") from None
    if "size" not in given:
        raise _bad(text, "size is missing: how many bytes of blocks it keeps, such as size=8GiB")
    named = {_FIELDS.get(name, name): value for name, value in given.items()}
    return TierOptions(kind, **{"name": kind, "place": place, "others": others} | named)  # type: ignore[arg-type]


def _bad(text: str, why: str) -> ConfigError:
    return ConfigError(f"{PARAM}: {text!r}: {why}", param=PARAM)


def _one_of(choices: tuple[str, ...], text: str) -> str:
    if text not in choices:
        raise ValueError(text)
    return text


def _between(low: int, high: int, text: str) -> int:
    if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
        raise ValueError(text)
    return int(text)


def _name(text: str) -> str:
    if not (0 < len(text) <= 32 and text.replace("_", "").replace("-", "").isalnum()):
        raise ValueError(text)
    return text


_READERS: Mapping[str, Callable[[str], object]] = {
    "size": parse_memory,
    "name": _name,
    "write": lambda text: _one_of(get_args(WritePolicy), text),
    "eviction": lambda text: _one_of(get_args(EvictionPolicy), text),
    "threads": lambda text: _between(1, THREADS_MAX, text),
    "slow_ms": lambda text: _between(1, 3_600_000, text),
}
_FIELDS = {"size": "capacity_bytes", "threads": "num_threads"}
_EXPECTED = {
    "size": "a size such as 64GiB, 80GB or 512MiB",
    "name": "a name of letters, digits, _ and -, of at most 32",
    "write": " or ".join(get_args(WritePolicy)),
    "eviction": " or ".join(get_args(EvictionPolicy)),
    "threads": f"a number from 1 to {THREADS_MAX}",
    "slow_ms": "a number of milliseconds from 1 to 3600000",
}
