"""Open tiers as the core knows them: names, policies, room, and what they have already."""

from collections.abc import Sequence

from disagg.messages.registration import Contract
from disagg.scheduling.actions import TierKey
from disagg.scheduling.tiers.index import TierSetting
from disagg.workers.tiers.options import TierOptions
from disagg.workers.tiers.protocol import Tier

OpenTiers = tuple[tuple[TierOptions, Tier], ...]


def known_to_core(tiers: OpenTiers, contract: Contract) -> tuple[TierSetting, ...]:
    """The settings of tiers for ``WorkerCore``; asks each one what it has, which may take long."""
    return tuple(
        setting_of(options, tier.capacity_bytes, tier.known(), contract) for options, tier in tiers
    )


def setting_of(
    options: TierOptions, capacity_bytes: int, known: Sequence[TierKey], contract: Contract
) -> TierSetting:
    """One tier for ``WorkerCore``; of several ranks by what each of them has room for."""
    return TierSetting(
        name=options.name,
        write=options.write,
        blocks_max=capacity_bytes // contract.block_bytes,
        slow_ms=options.slow_ms,
        known=known,
    )
