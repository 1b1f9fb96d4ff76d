"""Faults that one request has met, and that its next plan should avoid."""

from dataclasses import dataclass, field

from disagg.messages.identity import Incarnation
from disagg.messages.session import EndReason, PartEnded

TRANSFER_FAULTS = frozenset({EndReason.PEER_LOST, EndReason.READ_FAILED, EndReason.READ_STUCK})
"""Reasons that speak against the link between two workers, for other requests too."""
OF_THE_HANDOVER = frozenset(
    {
        EndReason.RESERVE_REFUSED,
        EndReason.LEASE_DEAD,
        EndReason.EXPIRED,
        EndReason.COMMIT_REFUSED,
        EndReason.READ_FAILED,
        EndReason.READ_STUCK,
    }
)
"""Reasons that mean the same for the next plan, whichever of the two workers reports them."""


def first_cause(ended: PartEnded) -> EndReason:
    """Why a hand-over ended, also where its other worker reports first that its peer has ended.

    The two reports travel on two streams, so the echo may arrive before what it echoes; its message
    is the reason that the peer gave.
    """
    if ended.reason is EndReason.PEER_ENDED:
        known = (*OF_THE_HANDOVER, EndReason.NO_TOKEN)
        return next((r for r in known if r.value == ended.message), ended.reason)
    return ended.reason


@dataclass(slots=True)
class Exclusions:
    """Workers and pairs that the next plan leaves out while there are others; never for good."""

    workers: set[Incarnation] = field(default_factory=set)
    """Workers where a step failed or the request ended for a reason of theirs."""
    decode: set[Incarnation] = field(default_factory=set)
    """Workers that had no room to decode the request."""
    pairs: set[frozenset[Incarnation]] = field(default_factory=set)
    """Workers between which a hand-over of the request failed or stood still."""
    local_on: Incarnation | None = None
    """The worker that should serve the request alone, as its last hand-over failed."""

    def learn(
        self, reason: EndReason, *, ended_by: Incarnation, prefill: Incarnation, decode: Incarnation
    ) -> None:
        """Take in why ``ended_by`` ended its part of the plan of ``prefill`` and ``decode``."""
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
            case EndReason.TAKE_OVER_REFUSED | EndReason.DRAINING:
                pass  # nobody's fault: the lease was gone, or no room for it; the worker ends
            case _:
                self.workers.add(ended_by)
