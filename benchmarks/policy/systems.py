"""What is compared: every rule, with the roles of the systems whose rule it is."""

from benchmarks.policy.figures import ALWAYS, COLOCATED, OURS
from benchmarks.policy.fleet import System

BOTH = ("both", "both")
SYSTEMS = (
    System(COLOCATED, "local", BOTH),
    System(ALWAYS, "prefix_then_load"),
    System("uncached_threshold", "uncached_threshold"),
    System("prefill_load", "prefill_load"),
    System("uncached_or_load", "uncached_or_load"),
    System("cache_affinity", "cache_affinity"),
    System(OURS, "estimated", BOTH),
)
