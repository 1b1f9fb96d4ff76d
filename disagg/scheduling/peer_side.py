"""Which message of another worker goes to which side, and what ends when a peer is lost."""

from disagg.messages.identity import Incarnation
from disagg.messages.peer import (
    AskLease,
    AskOffers,
    Commit,
    CommitAnswer,
    CommitSeen,
    Ended,
    LeaseLoading,
    LeaseRefused,
    Offers,
    PeerMessage,
    ReadProgress,
    Release,
    Reserve,
    Reserved,
    TakeOver,
    WithdrawLease,
    WrongEpoch,
)
from disagg.messages.session import EndReason
from disagg.messages.submit import Role
from disagg.scheduling.actions import CheckTransport
from disagg.scheduling.handover.decode_side import DecodeSide
from disagg.scheduling.handover.prefill_side import PrefillSide
from disagg.scheduling.handover.worker_state import WorkerState
from disagg.scheduling.parts import Parts
from disagg.scheduling.tiers.tier_side import TierSide
from disagg.transfer.actions import READ_FAULTS
from disagg.transfer.read_plan import ReadPlan


class PeerSide:
    """What other workers say, and what is known of how their blocks are read."""

    def __init__(
        self,
        worker: WorkerState,
        parts: Parts,
        prefill_side: PrefillSide,
        decode_side: DecodeSide,
        tiers: TierSide,
    ) -> None:
        self._out, self._plans = worker.out, worker.plans
        self._leases, self._lease_answers = worker.leases, worker.lease_answers
        self._inbound, self._lease_requests = worker.inbound, worker.lease_requests
        self._sequences = worker.generations.sequences
        self._parts, self._tiers = parts, tiers
        self._prefill_side, self._decode_side = prefill_side, decode_side

    def known(self, peer: Incarnation, plan: ReadPlan | None) -> None:
        """Note how a peer's blocks are read; None: whole, as they are like this worker's."""
        if plan is None:
            self._plans.pop(peer, None)
        else:
            self._plans[peer] = plan

    def on_message(self, now_ms: int, sender: Incarnation, message: PeerMessage) -> None:
        """Let the side that a message is for handle it; one for what has ended changes nothing."""
        match message:
            case Reserve():
                self._tiers.end_prefetch(message.key)
                self._decode_side.on_reserve(now_ms, sender, message)
            case Reserved():
                self._prefill_side.on_reserved(now_ms, sender, message)
            case Release():
                self._decode_side.on_release(sender, message)
            case Offers(request_number=None):
                self._inbound.on_offers(now_ms, sender, message)
            case Offers():
                self._lease_requests.on_offers(now_ms, sender, message)
            case LeaseRefused():
                self._lease_requests.on_refused(now_ms, sender, message)
            case LeaseLoading():
                self._lease_requests.on_loading(now_ms, sender, message)
            case ReadProgress():
                self._leases.on_read_progress(now_ms, sender, message)
            case CommitAnswer():
                self._inbound.on_commit_answer(now_ms, sender, message)
            case AskOffers():
                self._leases.on_ask(sender, message)
            case Commit():
                self._leases.on_commit(sender, message)
            case CommitSeen():
                self._leases.on_seen(sender, message)
            case AskLease():
                self._tiers.lending.on_ask_lease(now_ms, sender, message)
            case TakeOver():
                self._prefill_side.on_take_over(now_ms, sender, message)
            case WithdrawLease():
                self._doubt(sender, message.reason)
                self._tiers.lending.on_withdraw(sender, message)
                self._lease_answers.on_withdraw(sender, message)
            case Ended():
                self._doubt(sender, message.reason)
                self._ended(sender, message)
            case WrongEpoch():
                pass  # The addressee is another life of that worker: ours is gone.

    def lost(self, now_ms: int, peer: Incarnation) -> None:
        """End everything that goes on with a peer."""
        self._plans.pop(peer, None)  # what it says later comes behind another hello
        if any(lease.reader == peer for lease in self._leases.statuses()):
            # Perhaps it ended because its READs from here did not.
            self._out.add(CheckTransport(f"{peer} was lost while it read from here"))
        self._prefill_side.on_peer_lost(peer)
        self._tiers.lending.on_peer_lost(peer)
        self._lease_answers.on_peer_lost(peer)
        self._leases.on_peer_lost(now_ms, peer)
        self._lease_requests.on_peer_lost(now_ms, peer)
        self._inbound.on_peer_lost(now_ms, peer)
        self._decode_side.on_peer_lost(peer)
        for seq in list(self._sequences.values()):
            if seq.role is Role.PREFILL and seq.peer.incarnation == peer:
                self._parts.end(seq, EndReason.PEER_LOST, f"{peer} was lost")

    def _ended(self, sender: Incarnation, message: Ended) -> None:
        """The peer of a hand-over ended its part; anybody else changes nothing."""
        seq = self._sequences.get(message.key)
        if seq is None:
            self._leases.on_ended(sender, message)
        elif seq.submit.peer is None or seq.submit.peer.incarnation != sender:
            return
        elif seq.role is Role.PREFILL or self._decode_side.find(seq.key) is not None:
            # A decode worker that has committed needs the prefill worker's part no more.
            self._parts.end(seq, EndReason.PEER_ENDED, message.reason, tell_peer=False)

    def _doubt(self, reader: Incarnation, reason: str) -> None:
        """A reader's READs failed. It looks at its own transport; ours may be at fault as well."""
        if reason in READ_FAULTS:
            self._out.add(CheckTransport(f"{reader} reported {reason}"))
