"""The kinds of tiers: ours, and those that other packages bring."""

from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import entry_points

from disagg.errors import ConfigError
from disagg.messages.registration import Contract
from disagg.workers.tiers.contract import TierContract
from disagg.workers.tiers.options import PARAM, TierOptions, parse_tiers
from disagg.workers.tiers.protocol import Tier, TierFactory

ENTRY_POINTS = "disagg.tiers"
"""The group; an entry point's name is the kind, its object a `TierFactory`."""
_OURS = {
    "host": ("disagg.workers.tiers.host_tier", "HostTier"),
    "disk": ("disagg.workers.tiers.disk_tier", "DiskTier"),
    "object": ("disagg.workers.tiers.object_tier", "ObjectTier"),
}
"""Imported when they are used: an object store needs an extra."""


def kinds() -> list[str]:
    """Names of all kinds that are installed."""
    return sorted({*_OURS, *(entry.name for entry in entry_points(group=ENTRY_POINTS))})


def open_tiers(
    settings: Sequence[str], contract: Contract, rank: int = 0
) -> tuple[tuple[TierOptions, Tier], ...]:
    """Open the tiers of one rank, in order; those opened are closed where a later one fails.

    Args:
        settings: the worker's; each of its ranks gets an equal share of them.
        contract: with which the worker registers.
        rank: whose parts of blocks; of one rank they are whole.

    Raises:
        ConfigError: a setting, or what it names, cannot be used.
    """
    tier_contract = TierContract.of(contract, rank)
    shares = [of.share_of(contract.num_ranks) for of in parse_tiers(tuple(settings))]
    opened: list[tuple[TierOptions, Tier]] = []
    try:
        opened.extend((of, open_tier(of, tier_contract)) for of in shares)
    except ConfigError:
        for _, tier in opened:
            tier.close()
        raise
    return tuple(opened)


def open_tier(options: TierOptions, contract: TierContract) -> Tier:
    """Open one tier for the blocks of a contract.

    Raises:
        ConfigError: nobody knows the kind, or it cannot be opened.
    """
    factory = _factory(options.kind)
    tier = factory(options, contract)
    if tier.name != options.name or tier.capacity_bytes > options.capacity_bytes:
        raise ConfigError(
            f"{PARAM}: {options.kind} opened {tier.name!r} of {tier.capacity_bytes} bytes, not "
            f"{options.name!r} of at most {options.capacity_bytes}",
            param=PARAM,
        )
    return tier


def _factory(kind: str) -> TierFactory:
    if kind in _OURS:
        module, name = _OURS[kind]
        ours: TierFactory = getattr(import_module(module), name)
        return ours
    found = entry_points(group=ENTRY_POINTS, name=kind)
    if len(found) != 1:
        why = f"{len(found)} packages bring" if found else "nothing installed brings"
        raise ConfigError(
            f"{PARAM}: {why} tiers of kind {kind!r} (known: {', '.join(kinds())})", param=PARAM
        )
    (entry,) = found
    try:
        theirs: TierFactory = entry.load()
    except Exception as error:
        raise ConfigError(
            f"{PARAM}: tiers of kind {kind!r} do not load: {entry.value}: {error!r}", param=PARAM
        ) from error
    return theirs
