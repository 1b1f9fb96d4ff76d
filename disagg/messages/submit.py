"""What a router asks a worker to compute: one generation of a request, or its part."""

from dataclasses import field
from enum import StrEnum

from disagg.messages.frozen import dataclass
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.sampling import SamplingParams


class Role(StrEnum):
    """What a worker does for one generation of a request."""

    LOCAL = "local"
    """Prefill and decode here; no lease, no reservation."""
    PREFILL = "prefill"
    """Prefill here, hand over to the peer."""
    DECODE = "decode"
    """Reserve, pull from the peer, decode."""


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where the other worker of a hand-over is reached, and in which life."""

    incarnation: Incarnation
    address: str
    """host:port of its gRPC service."""


@dataclass(frozen=True, slots=True)
class PullPlan:
    """Where a prefill may find more of its prefix; never trusted, and optional."""

    owner: PeerAddress
    num_tokens: int
    """What the router believes usable there."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Start one generation of a request on a worker.

    What belongs to the client (tokens, salt) is in no repr, here and wherever else it is kept: a
    repr ends in logs and errors.
    """

    key: RequestKey
    role: Role
    token_ids: tuple[int, ...] = field(repr=False)
    """Prompt, plus the tokens already emitted when the router plans anew."""
    hashes: tuple[bytes, ...] = field(repr=False)
    """Chain values of the full hash blocks of ``token_ids`` (hashed once, by the router)."""
    cache_salt: bytes = field(repr=False)
    sampling: SamplingParams
    """``max_tokens`` counts from the end of ``token_ids``."""
    peer: PeerAddress | None = None
    pull: PullPlan | None = None
    """For roles that prefill."""
    take_over: RequestKey | None = None
    """For a decode: the generation whose sealed lease it takes over. ``token_ids`` then ends with
    the token that the lease carries, and nothing is prefilled for it."""
    traceparent: str = field(default="", repr=False)
    """W3C trace context of the router's span; "" where nothing is traced."""

    @property
    def asks(self) -> tuple[PeerAddress, ...]:
        """The workers that one who prefills will ask: for a reservation, for a prefix."""
        found = self.peer, self.pull.owner if self.pull is not None else None
        return tuple(peer for peer in found if peer is not None)
