"""Whole workers with one rule taken away each; the explorer must find what breaks."""

from collections.abc import Hashable

from disagg.kv.blocks.hits import CacheHit
from disagg.kv.blocks.step_holds import StepHolds
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.sequence import KVSequence
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import Ended, PeerMessage, Release, Reserve, Reserved
from disagg.messages.sampling import SampledToken
from disagg.scheduling.actions import WorkerAction
from disagg.scheduling.batcher import Batcher
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.handover.decode_side import DecodeSide
from disagg.scheduling.handover.prefill_side import PrefillSide
from disagg.scheduling.sequence import Sequence
from disagg.scheduling.step import Step
from disagg.transfer.actions import InboundCommitted, InboundStats, Send
from disagg.transfer.owner.table import LeaseTable
from disagg.transfer.reader.states import INBOUND_TABLE, InboundEvent, InboundState
from disagg.transfer.reader.table import InboundTable
from disagg.transfer.reader.transfer import InboundTransfer
from disagg.transfer.reservation.requests import ReservationRequests
from disagg.transfer.reservation.table import ReservationTable


class StepsHoldNothing(StepHolds):
    """A step is no holder: what its request gives up is free at once."""

    def drop(self, key: object, block_ids: list[int]) -> None:
        self._pool.release(block_ids)


class PublishesAtLaunch(WorkerCore):
    """Blocks enter the prefix cache when their step is launched."""

    def next_step(self, now_ms: int):  # type: ignore[no-untyped-def]
        step, actions = super().next_step(now_ms)
        for part in step.slices if step else ():
            self.kv.publish(part.key, part.start + len(part.token_ids))
        return step, actions


class OffersAtLaunch(WorkerCore):
    """A chunk is offered when its step is launched."""

    def next_step(self, now_ms: int) -> tuple[Step | None, list]:  # type: ignore[type-arg]
        step, actions = super().next_step(now_ms)
        for part in step.slices if step else ():
            seq = self.sequences[part.key]
            if seq.lease_id is not None and part.sampling is None:
                before, seq.num_computed = seq.num_computed, part.start + len(part.token_ids)
                self.prefill_side.offer(now_ms, seq, renew=False)
                seq.num_computed = before
        return step, [*actions, *self._out.take()]


class LeaseOutlivesPreemption(PrefillSide):
    """A preempted prefill keeps its lease and gives back the reservation only."""

    def give_back(self, seq: Sequence, reason: str) -> None:
        if reason == "preempted":
            self._release(seq.key)


class UnnumberedRequests(ReservationRequests):
    """Every request is the first one."""

    def ask(self, now_ms, key, peer):  # type: ignore[no-untyped-def]
        self._last_number = 0
        return super().ask(now_ms, key, peer)


class ValidBeforeCommit(InboundTable):
    """Believes the bytes when every READ is done, as a pipelined commit would."""

    def _repeat(self, now_ms: int, entry: InboundTransfer) -> None:
        if entry.state is not InboundState.COMMITTING or entry.offers.seal is None:
            super()._repeat(now_ms, entry)
            return
        entry.state = INBOUND_TABLE.move(entry.state, InboundEvent.OK)
        committed = InboundCommitted(
            entry.key, entry.offers.seal, InboundStats(0, (0,), 0, 0, 0, 0)
        )
        entry.listener.committed(now_ms, committed)


class PublishedBeforeCommit(DecodeSide):
    """Finds the prefix in its cache as soon as the memory is reserved."""

    def on_reserve(self, now_ms: int, sender: Incarnation, message: Reserve) -> None:
        super().on_reserve(now_ms, sender, message)
        if message.key in self.pulls and self._kv.num_free_blocks:
            self._kv._sequences[message.key].num_external = None
            self._kv.publish(message.key, 2)


class ReleasesAfterTheSeal(PrefillSide):
    """The end of a sealed lease gives back its reservation, as it once did."""

    def seal(self, now_ms: int, seq: Sequence, first: SampledToken) -> None:
        asked = self._requests._entries[seq.key]
        super().seal(now_ms, seq, first)
        self._requests._entries[seq.key] = asked


class ReleasesLateAnswers(PrefillSide):
    """A repeated grant is released although its lease lives or is committed, as it once was."""

    def on_late_answer(self, sender: Incarnation, late: Reserved) -> None:
        if late.granted:
            self._out.add(Send(sender, Release(late.key, late.number)))


class AnyoneEndsLeases(LeaseTable):
    """Does not look whose message ends a generation, as it once did."""

    def on_ended(self, sender: Incarnation, ended: Ended) -> None:
        self.end_key(ended.key, ended.reason)


class OffersBegunBlocks(PrefillSide):
    """Offers the block that the next chunk goes on writing."""

    def offer(self, now_ms: int, seq: Sequence, *, renew: bool) -> None:
        before = seq.num_computed
        size = max(manager.block_tokens for manager in self._kv.managers)
        seq.num_computed = -(-before // size) * size
        super().offer(now_ms, seq, renew=renew)
        seq.num_computed = before


class RecomputesInPlace(Batcher):
    """Adopts the whole prompt from the cache and computes its last token into the cached block."""

    def take_startable(self, *args, **options):  # type: ignore[no-untyped-def]
        for seq in super().take_startable(*args, **options):
            seq.begins_at(min(seq.num_computed, seq.num_tokens - 1))
            yield seq


class HitsWholePrompts(KVCacheCoordinator):
    """Finds the last token of a prompt, too."""

    def find_longest_cache_hit(self, request: KVSequence, max_tokens: int) -> CacheHit:
        return super().find_longest_cache_hit(request, max_tokens + 1)


class LeasesNeverExpire(LeaseTable):
    def expire(self, now_ms: int) -> None:
        pass


class ReservationsNeverExpire(ReservationTable):
    def expire(self, now_ms: int) -> list[RequestKey]:
        return []


class AsksForEver(ReservationRequests):
    def tick(self, now_ms: int):  # type: ignore[no-untyped-def]
        return []


class _GrantsAnyway(DecodeSide):
    """Grants reservations for generations it has no part in."""

    def begin(self, now_ms: int, seq: Sequence) -> None:
        self._ever.add(seq.key)
        super().begin(now_ms, seq)

    @property
    def _ever(self) -> set[RequestKey]:
        keys: set[RequestKey] = self.__dict__.setdefault("_submitted_ever", set())
        return keys

    def _grant(self, sender: Incarnation, message: Reserve) -> None:
        blocks = self._kv.pool.allocate(1)
        self._kv.pool.hold(("unknown", message.number), blocks)
        self._kv.pool.release(blocks)
        self._out.add(Send(sender, Reserved(message.key, message.number, True, "", (0,))))


class UnsubmittedReserved(_GrantsAnyway):
    """Grants although the router has not submitted the generation here."""

    def on_reserve(self, now_ms: int, sender: Incarnation, message: Reserve) -> None:
        if message.key not in self._ever:
            self._grant(sender, message)
            return
        super().on_reserve(now_ms, sender, message)


class EndedReserved(_GrantsAnyway):
    """Grants although the generation has ended here."""

    def on_reserve(self, now_ms: int, sender: Incarnation, message: Reserve) -> None:
        if message.key in self._ever and message.key not in self._reservations._entries:
            self._grant(sender, message)
            return
        super().on_reserve(now_ms, sender, message)


class PublishesNothing(KVCacheCoordinator):
    """What was pulled is used, but not found by others."""

    def commit_external(self, key: Hashable) -> None:
        self._sequences[key].num_external = None


def any_epoch(kind: type[PeerMessage]) -> type[WorkerCore]:
    """A worker that takes messages of a kind for the current life's, whichever life sent them."""

    def on_peer_message(
        self: WorkerCore, now_ms: int, sender: Incarnation, message: PeerMessage
    ) -> list[WorkerAction]:
        if isinstance(message, kind):
            sender = Incarnation(sender.worker_id, sender.worker_id[0].upper() + "0")
        return WorkerCore.on_peer_message(self, now_ms, sender, message)

    body = {"__module__": __name__, "on_peer_message": on_peer_message}
    return type(f"AnyEpoch[{kind.__name__}]", (WorkerCore,), body)
