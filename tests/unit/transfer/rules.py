"""Every rule of the protocol, and what happens without it."""

from tests.unit.transfer.fleet_rules import FLEET_RULES
from tests.unit.transfer.generation_rules import GENERATION_RULES
from tests.unit.transfer.lease_rules import LEASE_RULES
from tests.unit.transfer.mutual_rules import MUTUAL_RULES
from tests.unit.transfer.pair_rules import PAIR_RULES

RULES = (*LEASE_RULES, *PAIR_RULES, *FLEET_RULES, *MUTUAL_RULES, *GENERATION_RULES)
