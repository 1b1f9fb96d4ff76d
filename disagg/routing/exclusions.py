"""What one request has met with and its next plan should not repeat."""

from dataclasses import dataclass, field

from disagg.messages.identity import Incarnation
from disagg.messages.session import EndReason

TRANSFER_FAULTS = frozenset({EndReason.PEER_LOST, EndReason.READ_FAILED, EndReason.READ_STUCK})
"""Reasons that speak against the link between two workers, for other requests too."""


@dataclass(slots=True)
class Exclusions:
    """Preferences only: with nobody else left, the avoided are tried."""

    workers: set[Incarnation] = field(default_factory=set)
    """A step or the request ended there."""
    decode: set[Incarnation] = field(default_factory=set)
    """Had no room for its decode."""
    pairs: set[frozenset[Incarnation]] = field(default_factory=set)
    """A hand-over between these failed."""
    local_on: Incarnation | None = None
    """Better no hand-over again: this worker alone."""

    def learn(
        self, reason: EndReason, *, ended_by: Incarnation, prefill: Incarnation, decode: Incarnation
    ) -> None:
        """A worker ended its part of a plan of ``prefill`` and ``decode``."""
        self.local_on = None
        match reason:
            case EndReason.RESERVE_REFUSED:
                self.decode.add(decode)
            case EndReason.CAPACITY if ended_by == decode != prefill:
                self.decode.add(decode)
            case EndReason.PEER_ENDED | EndReason.PEER_LOST:
                self.pairs.add(frozenset((prefill, decode)))
                self.local_on = ended_by  # the peer is the one at fault, or gone
            case (
                EndReason.LEASE_DEAD
                | EndReason.EXPIRED
                | EndReason.COMMIT_REFUSED
                | EndReason.READ_FAILED
                | EndReason.READ_STUCK
            ):
                # The hand-over stood still or failed, whoever's bound ended it.
                self.pairs.add(frozenset((prefill, decode)))
                self.local_on = decode
            case EndReason.TAKE_OVER_REFUSED:
                pass  # nobody's fault: the lease was gone, or no room for it
            case _:
                self.workers.add(ended_by)
