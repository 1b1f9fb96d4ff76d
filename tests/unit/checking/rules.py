"""Every rule of the protocol, and what happens without it."""

from tests.unit.checking.checksum_rules import CHECKSUM_RULES
from tests.unit.checking.drain_rules import DRAIN_RULES
from tests.unit.checking.handover_rules import HANDOVER_RULES
from tests.unit.checking.lease_rules import LEASE_RULES
from tests.unit.checking.planning_rules import PLANNING_RULES
from tests.unit.checking.pull_rules import PULL_RULES
from tests.unit.checking.step_rules import STEP_RULES
from tests.unit.checking.tier_rules import TIER_RULES
from tests.unit.checking.waiting_rules import WAITING_RULES

RULES = (
    *LEASE_RULES,
    *HANDOVER_RULES,
    *STEP_RULES,
    *PULL_RULES,
    *TIER_RULES,
    *CHECKSUM_RULES,
    *WAITING_RULES,
    *PLANNING_RULES,
    *DRAIN_RULES,
)
