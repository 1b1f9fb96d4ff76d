"""The decode worker's side of a hand-over: reserve, pull, commit, report."""

from dataclasses import dataclass

from disagg.kv.blocks.hits import ExternalReservation
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.prefix_sharing import PrefixSharing
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import Offers, Release, Reserve, TakeOver
from disagg.messages.session import TransferKind, TransferReport
from disagg.scheduling.limits import WorkerLimits
from disagg.scheduling.outgoing import peer_of
from disagg.scheduling.sequence import Phase, Sequence
from disagg.scheduling.share import HandoverShare
from disagg.scheduling.transfer_report import committed_report
from disagg.transfer.actions import InboundAction, InboundCommitted, InboundPartial, Send
from disagg.transfer.inbound import InboundTable
from disagg.transfer.lease_asker import LeaseAsker
from disagg.transfer.reservations import Answer, Decide, Refuse, ReservationTable


@dataclass(frozen=True, slots=True)
class Pull:
    """A sequence that waits for its KV, and what was reserved for it."""

    seq: Sequence
    reservation: ExternalReservation


class Incoming:
    """Hand-overs that arrive at this worker."""

    def __init__(
        self,
        coordinator: KVCacheCoordinator,
        prefixes: PrefixSharing,
        inbound: InboundTable,
        asker: LeaseAsker,
        share: HandoverShare,
        limits: WorkerLimits,
    ) -> None:
        self._kv = coordinator
        self._prefixes = prefixes
        self._inbound = inbound
        self._asker = asker
        self._share = share
        self._reservations = ReservationTable(ttl_ms=limits.reservation_ttl_ms)
        self.awaiting: dict[RequestKey, Sequence] = {}
        self.pulls: dict[RequestKey, Pull] = {}

    def submitted(self, now_ms: int, seq: Sequence) -> None:
        """The router named this worker as decode worker; nothing is held yet."""
        seq.phase = Phase.AWAITING_RESERVE
        self.awaiting[seq.key] = seq
        self._reservations.submitted(now_ms, seq.key, peer_of(seq).incarnation)

    def on_reserve(
        self, now_ms: int, sender: Incarnation, message: Reserve, refusal: str
    ) -> list[InboundAction]:
        """Answer at once. ``refusal`` is the worker's reason to say no to anybody, or ""."""
        verdict = self._reservations.consider(sender, message)
        if isinstance(verdict, Answer | Refuse):
            return [Send(sender, verdict.message)]
        if not isinstance(verdict, Decide):
            return []
        actions = self._drop_reservation(now_ms, message.key, "superseded")
        reservation = None
        if not refusal:
            seq = self.awaiting[message.key]
            reservation, refusal = self._try_reserve(seq, seq.num_prompt_tokens)
        first_lacked: tuple[int, ...] = ()
        if reservation is not None:
            seq = self.awaiting.pop(message.key)
            seq.phase = Phase.PULLING
            self.pulls[seq.key] = Pull(seq, reservation)
            self._inbound.begin(now_ms, seq.key, sender, reservation.lacks)
            first_lacked = self._first_lacked(seq.key, reservation)
        answer = self._reservations.decided(
            now_ms,
            message.key,
            message.number,
            granted=reservation is not None,
            reason=refusal,
            first_lacked=first_lacked,
        )
        return [*actions, Send(sender, answer)]

    def take_over(self, now_ms: int, seq: Sequence) -> tuple[list[Send], str]:
        """Reserve, and ask for the lease that a lost decode worker has left; or why not."""
        old = seq.submit.take_over
        assert old is not None
        # The last token came with the lease: its KV is the first thing computed here.
        reservation, refusal = self._try_reserve(seq, seq.num_prompt_tokens - 1)
        if reservation is None:
            return [], refusal
        seq.phase = Phase.PULLING
        self.pulls[seq.key] = Pull(seq, reservation)
        question = TakeOver(seq.key, 0, old, self._first_lacked(seq.key, reservation))
        return [self._asker.ask(now_ms, peer_of(seq).incarnation, question)], ""

    def covers(self, offers: Offers) -> bool:
        """Whether a lease is of the very tokens that the router says it is of."""
        pull, seal = self.pulls[offers.key], offers.seal
        return (
            seal is not None
            and seal.num_tokens == pull.reservation.num_external_tokens
            and seal.first_token_id == pull.seq.submit.token_ids[-1]
        )

    def answered(self, now_ms: int, owner: Incarnation, offers: Offers) -> list[InboundAction]:
        """The lease is ours: read it."""
        lacks = self.pulls[offers.key].reservation.lacks
        self._inbound.begin(now_ms, offers.key, owner, lacks, offers.lease_id)
        return self._inbound.on_offers(now_ms, owner, offers)

    def on_release(self, now_ms: int, sender: Incarnation, message: Release) -> list[InboundAction]:
        """The prefill worker gives the reservation back; a later one may follow."""
        if not self._reservations.on_release(sender, message):
            return []
        return self._drop_reservation(now_ms, message.key, "released")

    def expired(self, now_ms: int) -> list[Sequence]:
        """Sequences whose reservation outlived its time."""
        keys = self._reservations.expire(now_ms)
        return [seq for key in keys if (seq := self.find(key)) is not None]

    def find(self, key: RequestKey) -> Sequence | None:
        """The sequence of a generation that still waits for its KV."""
        pull = self.pulls.get(key)
        return pull.seq if pull is not None else self.awaiting.get(key)

    def owned_by(self, peer: Incarnation) -> list[Sequence]:
        """Those who wait for KV from this incarnation."""
        waiting = [*self.awaiting.values(), *(pull.seq for pull in self.pulls.values())]
        return [seq for seq in waiting if peer_of(seq).incarnation == peer]

    def committed(self, event: InboundCommitted) -> tuple[Sequence, TransferReport]:
        """The owner confirmed: the blocks are valid and may be read, published and lent."""
        pull = self.pulls.pop(event.key)
        seq, key = pull.seq, event.key
        owner = peer_of(seq).incarnation
        report = committed_report(
            self._kv, key, owner, TransferKind.HANDOVER, pull.reservation, event.stats
        )
        self._kv.commit_external(key)
        self._inbound.finish(key)
        self._reservations.ended(key)
        self._share.give_back(key)
        if seq.submit.take_over is not None:
            self._asker.finished(key)
        seq.num_computed = pull.reservation.num_external_tokens
        return seq, report

    def partly_committed(self, event: InboundPartial) -> Sequence:
        """Some blocks did not arrive: the others are found by whoever goes on from here."""
        pull = self.pulls[event.key]
        num_tokens = pull.reservation.num_external_tokens
        self._prefixes.publish_intact(pull.seq.request, num_tokens, event.failed)
        self._inbound.finish(event.key)
        return pull.seq

    def end(self, now_ms: int, seq: Sequence, reason: str) -> list[InboundAction]:
        """This generation gets no KV here; destinations stay held until READs are terminal."""
        self.awaiting.pop(seq.key, None)
        self._reservations.ended(seq.key)
        if self.pulls.pop(seq.key, None) is None:
            return []
        withdrawn: list[Send] = self._asker.give_up(seq.key)
        actions = self._inbound.abort(now_ms, seq.key, reason)
        self._kv.free(seq.key)
        self._share.give_back(seq.key)
        return [*withdrawn, *actions]

    def _first_lacked(self, key: RequestKey, reservation: ExternalReservation) -> tuple[int, ...]:
        tables = self._kv.block_table(key)
        return tuple(
            lacks[0][0] if lacks else len(table)
            for lacks, table in zip(reservation.lacks, tables, strict=True)
        )

    def _try_reserve(
        self, seq: Sequence, num_tokens: int
    ) -> tuple[ExternalReservation | None, str]:
        reservation = self._kv.reserve_external(seq.request, num_tokens)
        if reservation is None:
            return None, "no memory"
        if not self._share.take(seq.key, sum(self._kv.held(seq.key))):
            self._kv.free(seq.key)
            return None, "hand-over share used up"
        return reservation, ""

    def _drop_reservation(self, now_ms: int, key: RequestKey, reason: str) -> list[InboundAction]:
        pull = self.pulls.pop(key, None)
        if pull is None:
            return []
        actions = self._inbound.abort(now_ms, key, reason)
        self._kv.free(key)
        self._share.give_back(key)
        pull.seq.phase = Phase.AWAITING_RESERVE
        self.awaiting[key] = pull.seq
        return actions
