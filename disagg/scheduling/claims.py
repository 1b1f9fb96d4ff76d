"""Names under which requests are served: of several requests of one name only the last one is."""

from disagg.messages.identity import RequestKey
from disagg.messages.session import Claim

CLAIMS_MAX = 65_536
"""Names remembered; what is forgotten can no longer be superseded here."""


class Claims:
    """Who claimed a name last. Routers share nothing, but they share their workers.

    A request's end is not waited for: a name that is claimed again later supersedes a request that
    is over, which changes nothing.
    """

    def __init__(self) -> None:
        self._holders: dict[bytes, RequestKey] = {}

    def take(self, claim: Claim) -> RequestKey | None:
        """Note a claim; returns the other request that it supersedes, if there is one."""
        earlier = self._holders.pop(claim.name, None)
        self._holders[claim.name] = claim.key
        if len(self._holders) > CLAIMS_MAX:
            del self._holders[next(iter(self._holders))]
        if earlier is None or same_request(earlier, claim.key):
            return None
        return earlier

    def router_lost(self, router: str) -> None:
        """Forget a router's claims: its requests have ended."""
        self._holders = {name: key for name, key in self._holders.items() if key.router != router}


def same_request(one: RequestKey, other: RequestKey) -> bool:
    """Whether two keys are of one request of one router, in any of its generations."""
    return one[::2] == other[::2]
