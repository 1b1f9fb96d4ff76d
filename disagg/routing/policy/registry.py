"""The policies by the name that the setting `router.policy` gives them."""

from collections.abc import Callable

from disagg.errors import ConfigError
from disagg.routing.policy.cache_affinity import CacheAffinity
from disagg.routing.policy.conditional import prefill_load, uncached_or_load, uncached_threshold
from disagg.routing.policy.estimated import Estimated
from disagg.routing.policy.local import Local
from disagg.routing.policy.policy import Policy
from disagg.routing.policy.prefix_then_load import PrefixThenLoad
from disagg.routing.policy.protocol import PolicyOptions

POLICIES: dict[str, Callable[[PolicyOptions], Policy]] = {
    "prefix_then_load": PrefixThenLoad,
    "local": Local,
    "estimated": Estimated,
    "uncached_threshold": uncached_threshold,
    "prefill_load": prefill_load,
    "uncached_or_load": uncached_or_load,
    "cache_affinity": CacheAffinity,
}
DEFAULT_POLICY = "estimated"


def make_policy(name: str, options: PolicyOptions) -> Policy:
    """Build the policy of that name.

    Raises:
        ConfigError: no policy has it; with the names there are.
    """
    if name not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        raise ConfigError(f"no policy is named {name!r}; known: {known}", param="router.policy")
    return POLICIES[name](options)
