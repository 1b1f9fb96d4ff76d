"""The decode worker's side of a hand-over: reserve, pull, commit, report."""

from dataclasses import dataclass

from disagg.kv.blocks.hits import ExternalReservation
from disagg.kv.transfer_plan import first_lacked
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.outputs import FinishReason, StepOutputs
from disagg.messages.peer import Ended, Offers, Release, Reserve, Seal, TakeOver
from disagg.messages.reports import TransferKind
from disagg.messages.sampling import SampledToken, TokenLogprobs
from disagg.messages.session import EndReason
from disagg.scheduling.actions import ConnectPeer, ToRouter
from disagg.scheduling.handover.inbound_admission import STUCK
from disagg.scheduling.handover.report import committed_report, pulled_bytes, read_progress
from disagg.scheduling.handover.worker_state import WorkerState
from disagg.scheduling.sequence import Phase, Sequence
from disagg.transfer.actions import (
    InboundCommitted,
    InboundDrained,
    InboundFailed,
    InboundPartial,
    Send,
)
from disagg.transfer.reservation.table import Decide, Ignore, ReservationTable


@dataclass(frozen=True, slots=True)
class Pull:
    """A sequence that waits for its KV, and what was reserved for it."""

    seq: Sequence
    reservation: ExternalReservation


class DecodeSide:
    """Hand-overs that arrive at this worker.

    Attributes:
        awaiting: sequences that nothing is reserved for yet.
        pulls: sequences whose blocks are reserved.
    """

    def __init__(self, worker: WorkerState) -> None:
        self._prefixes = worker.prefixes
        self._kv, self._limits, self._budget = worker.kv, worker.limits, worker.budget
        self._batcher, self._generations = worker.batcher, worker.generations
        self._counters, self._out = worker.counters, worker.out
        self._admission = worker.admission
        self._inbound, self._requests = worker.inbound, worker.lease_requests
        self._parts_from = worker.parts_from
        self._reservations = ReservationTable(ttl_ms=worker.limits.reservation_ttl_ms)
        self.awaiting: dict[RequestKey, Sequence] = {}
        self.pulls: dict[RequestKey, Pull] = {}

    # -- beginning ----------------------------------------------------------------------------

    def begin(self, now_ms: int, seq: Sequence) -> None:
        """The router named this worker as decode worker; nothing is held yet."""
        if seq.submit.take_over is not None:
            self._request_take_over(now_ms, seq, seq.submit.take_over)
        elif len(self.awaiting) >= self._limits.max_waiting:
            self.end(seq, EndReason.CAPACITY, "too many awaited hand-overs")
        else:
            self._out.add(ConnectPeer(seq.peer))
            seq.phase = Phase.AWAITING_RESERVE
            self.awaiting[seq.key] = seq
            self._reservations.submitted(now_ms, seq.key, seq.peer.incarnation)

    def on_reserve(self, now_ms: int, sender: Incarnation, message: Reserve) -> None:
        """Grant or refuse a reservation at once; end the part where none would ever be granted."""
        verdict = self._reservations.consider(sender, message)
        if isinstance(verdict, Ignore):
            return
        if not isinstance(verdict, Decide):
            self._out.add(Send(sender, verdict.message))
            return
        key = message.key
        self._drop_reservation(key)
        lacked: tuple[int, ...] = ()
        seq = self.awaiting[key]
        if sender in self._inbound.peers_paused:
            # It may be stuck for long: the router is to plan anew, and to let the pair rest.
            self.end(seq, EndReason.READ_STUCK, STUCK)
            return
        reservation, refusal = self._try_reserve(seq, seq.num_prompt_tokens)
        if reservation is not None:
            del self.awaiting[key]
            seq.phase = Phase.PULLING
            self.pulls[key] = Pull(seq, reservation)
            lacked = self._begin(now_ms, sender, self.pulls[key])
        granted = reservation is not None
        answer = self._reservations.decided(now_ms, key, message.number, granted, refusal, lacked)
        self._out.add(Send(sender, answer))

    def on_release(self, sender: Incarnation, message: Release) -> None:
        """The prefill worker gives the reservation back; a later one may follow."""
        if self._reservations.on_release(sender, message):
            self._drop_reservation(message.key)

    # -- a take-over: the lease exists already ------------------------------------------------

    def lease_granted(self, now_ms: int, owner: Incarnation, offers: Offers) -> None:
        """Read a lease that was taken over, if it is of the tokens that the router named."""
        pull, seal = self.pulls[offers.key], offers.seal
        if (
            seal is None
            or seal.num_tokens != pull.reservation.num_external_tokens
            or seal.first_token_id != pull.seq.submit.token_ids[-1]
        ):
            self.lease_refused(now_ms, offers.key, "answer", "not what was requested")
            return
        self._begin(now_ms, owner, pull, offers.lease_id)
        self._inbound.on_offers(now_ms, owner, offers)

    def lease_refused(self, now_ms: int, key: RequestKey, cause: str, message: str) -> None:
        """There is no lease to take over: end the part, so that the router plans anew."""
        seq = self.find(key)
        if seq is not None:
            self.end(seq, EndReason.TAKE_OVER_REFUSED, f"{cause}: {message}")

    # -- news of the inbound transfer ---------------------------------------------------------

    def progressed(self, now_ms: int, key: RequestKey) -> None:
        """Prolong the reservation, or the request of a take-over; show the router what is read."""
        self._reservations.renew(now_ms, key)
        self._requests.renew(now_ms, key)
        pull = self.pulls[key]
        if pull.seq.shows_progress(now_ms, self._limits.progress_ms):
            num_read = self._inbound.num_blocks_read(key)
            self._out.add(ToRouter(read_progress(key, pull.reservation, num_read)))

    def committed(self, now_ms: int, event: InboundCommitted) -> None:
        """The blocks may be read, published and lent from now on: decode."""
        pull, seal = self.pulls[event.key], event.seal
        is_other = seal.num_tokens != pull.reservation.num_external_tokens
        if pull.seq.submit.take_over is None and (is_other or seal.first_token_id is None):
            message = f"{pull.seq.peer.incarnation} broke the protocol: its seal is of other tokens"
            self.end(pull.seq, EndReason.READ_FAILED, message)
            return
        del self.pulls[event.key]
        seq, key, external = pull.seq, event.key, pull.reservation
        owner = seq.peer.incarnation
        kind = TransferKind.HANDOVER
        report = committed_report(self._kv, key, owner, kind, external, event.stats)
        self._kv.commit_external(key)
        self._inbound.finish(key)
        self._reservations.ended(key)
        self._budget.give_back(key)
        seq.begins_at(external.num_external_tokens)
        seq.prefill_reported = True
        self._counters.add("transfers_committed")
        self._counters.add("pulled_bytes", pulled_bytes(report))
        self._out.add(ToRouter(report))
        if seq.submit.take_over is not None:
            self._requests.finished(key)
            self._counters.add("take_overs")
            self._batcher.run(seq)
        else:
            self._emit_first_token(seq, event.seal)

    def partly_committed(self, now_ms: int, event: InboundPartial) -> None:
        """Publish the blocks that arrived, for whoever goes on from here; end the part."""
        self._counters.add("transfers_recovered")
        self._counters.add("transfers_failed_read_failed")
        pull = self.pulls[event.key]
        num_tokens = pull.reservation.num_external_tokens
        self._prefixes.publish_intact(pull.seq.request, num_tokens, event.failed)
        self._inbound.finish(event.key)
        self.end(pull.seq, EndReason.READ_FAILED, event.message)

    def failed(self, now_ms: int, event: InboundFailed) -> None:
        """End the part: the router plans anew."""
        self._counters.add("transfers_failed_" + event.reason)
        seq = self.find(event.key)
        if seq is not None:
            self.end(seq, EndReason(event.reason), event.message)

    def drained(self, event: InboundDrained) -> None:
        """Count a transfer whose destinations are free again."""
        self._counters.add("transfers_drained")

    # -- ending -------------------------------------------------------------------------------

    def find(self, key: RequestKey) -> Sequence | None:
        """The sequence of a generation that still waits for its KV."""
        pull = self.pulls.get(key)
        return pull.seq if pull is not None else self.awaiting.get(key)

    def tick(self, now_ms: int) -> None:
        """End the parts whose reservation outlived its time."""
        for key in self._reservations.expire(now_ms):
            seq = self.find(key)
            if seq is not None:
                self.end(seq, EndReason.EXPIRED, "nothing was offered or read for too long")

    def on_peer_lost(self, peer: Incarnation) -> None:
        """End the parts that wait for KV from an incarnation that is gone."""
        waiting = [*self.awaiting.values(), *(pull.seq for pull in self.pulls.values())]
        for seq in waiting:
            if seq.peer.incarnation == peer:
                self.end(seq, EndReason.PEER_LOST, f"{peer} was lost")

    def end(
        self, seq: Sequence, reason: EndReason, message: str, *, tell_peer: bool = True
    ) -> None:
        """End a generation; destinations stay held until no READ is in progress."""
        if self.find(seq.key) is not None:
            self._leave(seq)
            if tell_peer:
                self._out.add(Send(seq.peer.incarnation, Ended(seq.key, reason)))
        self._generations.end(seq, reason, message)

    # -- inside -------------------------------------------------------------------------------

    def _begin(
        self, now_ms: int, owner: Incarnation, pull: Pull, lease_id: int | None = None
    ) -> tuple[int, ...]:
        """Wait for the owner's offers; returns per group the first token that is lacked."""
        key, lacks = pull.seq.key, pull.reservation.lacks
        lacked = first_lacked(self._kv.managers, key, lacks)
        num_tokens = pull.reservation.num_external_tokens
        parts = self._parts_from(owner, key, num_tokens, lacks, lacked)
        self._inbound.begin(now_ms, key, owner, lacks, self, lease_id, parts=parts)
        return lacked

    def _request_take_over(self, now_ms: int, seq: Sequence, old: RequestKey) -> None:
        # The last token came with the lease: its KV is the first thing computed here.
        reservation, refusal = self._try_reserve(seq, seq.num_prompt_tokens - 1)
        if reservation is None:
            self.end(seq, EndReason.TAKE_OVER_REFUSED, refusal)
            return
        self._out.add(ConnectPeer(seq.peer))
        seq.phase = Phase.PULLING
        self.pulls[seq.key] = Pull(seq, reservation)
        lacked = first_lacked(self._kv.managers, seq.key, reservation.lacks)
        request = TakeOver(seq.key, 0, old, lacked)
        self._requests.ask(now_ms, seq.peer.incarnation, request, self)

    def _emit_first_token(self, seq: Sequence, seal: Seal) -> None:
        """Token 0 goes to the router from here too: the prefill worker may die any moment."""
        assert seal.first_token_id is not None
        logprobs = None
        if seq.submit.sampling.num_logprobs is not None:
            logprobs = TokenLogprobs(seal.first_logprob, seal.first_top_logprobs)
        output = self._generations.emit(seq, SampledToken(seal.first_token_id, logprobs))
        if output.finish_reason is FinishReason.NONE:
            self._batcher.run(seq)
        else:
            self._generations.forget(seq)
        self._out.add(ToRouter(StepOutputs((output,))))

    def _try_reserve(
        self, seq: Sequence, num_tokens: int
    ) -> tuple[ExternalReservation | None, str]:
        refusal = self._admission.refusal(seq.peer.incarnation)
        if refusal:
            return None, refusal
        reservation = self._kv.reserve_external(seq.request, num_tokens)
        if reservation is None:
            return None, "no memory"
        if not self._budget.take(seq.key, sum(self._kv.tables.num_held(seq.key))):
            self._kv.free(seq.key)
            return None, "hand-over share used up"
        return reservation, ""

    def _drop_reservation(self, key: RequestKey) -> None:
        pull = self.pulls.pop(key, None)
        if pull is not None:
            self._give_back(key)
            pull.seq.phase = Phase.AWAITING_RESERVE
            self.awaiting[key] = pull.seq

    def _leave(self, seq: Sequence) -> None:
        self.awaiting.pop(seq.key, None)
        self._reservations.ended(seq.key)
        if self.pulls.pop(seq.key, None) is not None:
            self._requests.give_up(seq.key)
            self._give_back(seq.key)

    def _give_back(self, key: RequestKey) -> None:
        self._inbound.abort(key)
        self._kv.free(key)
        self._budget.give_back(key)
