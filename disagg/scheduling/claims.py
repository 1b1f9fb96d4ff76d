"""Names under which requests are served: of several requests of one name only the last one is."""

from typing import NamedTuple

from disagg.messages.identity import RequestKey
from disagg.messages.session import Claim

CLAIMS_MAX = 65_536
"""Names remembered; what is forgotten can no longer be superseded here."""
TOGETHER_MS = 1_000
"""Claims that come within so long may come in another order at another worker."""


class _Holder(NamedTuple):
    claim: Claim
    came_ms: int


class Claims:
    """Which request of a name is the last one. Routers share nothing, but they share their workers.

    The one that came later is, whatever the routers' clocks say: a client sends again after a
    while. A request that waited at its router came before its claim, by the time that it waited. Of
    two that come almost together that would be another one at each worker, and both would end; so
    of those it is the one that was accepted later. A request that is planned anew was not sent
    again, however late its claim comes: what was accepted later keeps the name.

    A request's end is not waited for: a name that is claimed again later supersedes a request that
    is over, which changes nothing.
    """

    def __init__(self) -> None:
        self._holders: dict[bytes, _Holder] = {}

    def take(self, now_ms: int, claim: Claim) -> RequestKey | None:
        """Note a claim; returns the request that is superseded by it or for it, if there is one."""
        holder = self._holders.get(claim.name)
        came_ms = now_ms - claim.waited_ms
        if holder is None or same_request(holder.claim.key, claim.key):
            self._hold(_Holder(claim, holder.came_ms if holder and claim.again else came_ms))
            return None
        is_later = _order(claim) > _order(holder.claim)
        if not claim.again and abs(came_ms - holder.came_ms) >= TOGETHER_MS:
            is_later = came_ms > holder.came_ms
        if not is_later:
            return claim.key
        self._hold(_Holder(claim, came_ms))
        return holder.claim.key

    def router_lost(self, router: str) -> None:
        """Forget a router's claims: its requests have ended."""
        self._holders = {
            name: holder
            for name, holder in self._holders.items()
            if holder.claim.key.router != router
        }

    def __len__(self) -> int:
        return len(self._holders)

    def _hold(self, holder: _Holder) -> None:
        self._holders.pop(holder.claim.name, None)
        self._holders[holder.claim.name] = holder
        if len(self._holders) > CLAIMS_MAX:
            del self._holders[next(iter(self._holders))]


def same_request(one: RequestKey, other: RequestKey) -> bool:
    """Whether two keys are of one request of one router, in any of its generations."""
    return one[::2] == other[::2]


def _order(claim: Claim) -> tuple[int, str]:
    """The same at all workers."""
    return claim.accepted_ms, claim.key.router
