"""Workers that wait while holding, overtake or starve; the explorer must find what breaks."""

from disagg.kv.blocks.hits import CacheHit
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.messages.identity import Incarnation
from disagg.messages.peer import PeerMessage, Reserve, Reserved
from disagg.messages.submit import Role
from disagg.scheduling.actions import WorkerAction
from disagg.scheduling.batcher import Batcher
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.handover.inbound_admission import InboundAdmission
from disagg.scheduling.handover.prefill_side import PrefillSide
from disagg.scheduling.sequence import Phase, Sequence
from disagg.scheduling.step import Step
from disagg.transfer.actions import Send
from disagg.transfer.reservation.states import ReservationState


class QueuesReserves(WorkerCore):
    """Answers a Reserve when there is memory, not at once."""

    def on_peer_message(
        self, now_ms: int, sender: Incarnation, message: PeerMessage
    ) -> list[WorkerAction]:
        if isinstance(message, Reserve):
            self._queued.append((sender, message))
            return []
        return super().on_peer_message(now_ms, sender, message)

    def next_step(self, now_ms: int) -> tuple[Step | None, list[WorkerAction]]:
        actions: list[WorkerAction] = []
        for sender, message in list(self._queued):
            answers = super().on_peer_message(now_ms, sender, message)
            said = [a.message for a in answers if isinstance(a, Send)]
            no = any(isinstance(one, Reserved) and not one.granted for one in said)
            if no and message.key in self.decode_side.awaiting:
                entry = self.decode_side._reservations._entries[message.key]
                entry.state, entry.number, entry.answer = ReservationState.SUBMITTED, 0, None
                continue
            self._queued.remove((sender, message))
            actions += answers
        step, more = super().next_step(now_ms)
        return step, [*actions, *more]

    @property
    def _queued(self) -> list[tuple[Incarnation, Reserve]]:
        requests: list[tuple[Incarnation, Reserve]] = self.__dict__.setdefault(
            "_queued_requests", []
        )
        return requests


class PromisesOneToken(KVCacheCoordinator):
    """Admits a prompt by its first block."""

    def admit(self, key: object, num_tokens_total: int, hit: CacheHit | None = None) -> bool:
        return super().admit(key, (hit.num_tokens if hit else 0) + 1, hit)


class PrefillsWaitForBlocks(Batcher):
    """A prefill that lacks a block waits for it, and keeps what it has."""

    def _make_room(self, seq, num_new, chosen, preempted):  # type: ignore[no-untyped-def]
        if seq.role is Role.PREFILL:
            return self._kv.allocate(seq.request, num_new_tokens=num_new)
        return super()._make_room(seq, num_new, chosen, preempted)


class KeepsReservations(PrefillSide):
    """A preempted prefill keeps its lease and its reservation."""

    def give_back(self, seq: Sequence, reason: str) -> None:
        if reason != "preempted":
            super().give_back(seq, reason)


class GoesOnUnderTheOldLease(KeepsReservations):
    """And goes on under its old lease, without asking anybody."""

    def start(self, now_ms: int, seq: Sequence) -> None:
        if seq.lease_id is None:
            super().start(now_ms, seq)
        else:
            self._batcher.run(seq)


class HoldsWhileItWaits(PrefillSide):
    """A refused prefill keeps its own blocks until it asks again."""

    def _back_off(self, now_ms: int, seq: Sequence) -> None:
        seq.phase = Phase.BACKOFF
        self._budget.give_back(seq.key)
        seq.passes += 1
        seq.retry_at_ms = now_ms
        self.backing_off.append(seq)


class AsksAgain(Batcher):
    """Lets those begin that kept their blocks."""

    def take_startable(self, *args, **options):  # type: ignore[no-untyped-def]
        for seq in [one for one in self.waiting if one.key in self._kv._promises]:
            self.waiting.remove(seq)
            yield seq
        yield from super().take_startable(*args, **options)


class TakesReservationsAnyway(InboundAdmission):
    """Grants a Reserve while an older request waits for memory."""

    def refusal(self, owner: Incarnation) -> str:
        return ""
