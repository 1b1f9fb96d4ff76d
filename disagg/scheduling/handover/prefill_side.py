"""The prefill worker's side of a hand-over: reserve there, compute, lease, seal."""

from collections.abc import Callable
from dataclasses import replace

from disagg.kv.transfer_plan import complete_blocks, first_blocks, moved_blocks
from disagg.messages.identity import Incarnation, LeaseRequest, RequestKey
from disagg.messages.peer import Ended, Reserved, TakeOver
from disagg.messages.sampling import SampledToken, TokenLogprobs
from disagg.messages.session import EndReason
from disagg.messages.submit import Role
from disagg.scheduling.admission import num_blocks_for
from disagg.scheduling.handover.worker_state import WorkerState
from disagg.scheduling.sequence import Phase, Sequence
from disagg.transfer.actions import LeaseCommitted, LeaseEnded, Send
from disagg.transfer.reservation.requests import Granted, Refused, ReservationRequests


class PrefillSide:
    """Prefills of this worker that are handed over, and their leases.

    ``random_delay_ms(passes)`` is drawn at every refusal: a deterministic back-off livelocks two
    workers that prefill for each other.

    Attributes:
        reserving: sequences whose reservation was requested.
        backing_off: sequences whose reservation was refused, until they try again.
    """

    def __init__(self, worker: WorkerState, random_delay_ms: Callable[[int], int]) -> None:
        self._kv, self._limits, self._budget = worker.kv, worker.limits, worker.budget
        self._batcher, self._generations = worker.batcher, worker.generations
        self._counters, self._out = worker.counters, worker.out
        self._leases, self._answers = worker.leases, worker.lease_answers
        self._requests = ReservationRequests(timeout_ms=worker.limits.reserve_timeout_ms)
        self._random_delay_ms = random_delay_ms
        self.reserving: dict[RequestKey, Sequence] = {}
        self.backing_off: list[Sequence] = []
        self.num_refusals = 0
        self._ended_leases: list[tuple[RequestKey, int]] = []
        """Generation and id of leases that ended since the last `tick`."""

    # -- the reservation ----------------------------------------------------------------------

    def start(self, now_ms: int, seq: Sequence) -> None:
        """Start a sequence that holds its own blocks: compute it, or first reserve elsewhere.

        When the budget is used up the sequence backs off at once and holds nothing.
        """
        if seq.role is not Role.PREFILL:
            self._run(now_ms, seq)
        elif self._budget.take(seq.key, num_blocks_for(self._kv, seq.num_tokens)):
            seq.phase = Phase.RESERVING
            self.reserving[seq.key] = seq
            self._out.add(self._requests.ask(now_ms, seq.key, seq.peer.incarnation))
        else:
            self._back_off(now_ms, seq)

    def on_reserved(self, now_ms: int, sender: Incarnation, message: Reserved) -> None:
        """The decode worker's answer: compute under a lease, or back off."""
        if message.key not in self._generations.sequences:
            self.on_late_answer(sender, message)
            return
        match self._requests.on_answer(now_ms, sender, message):
            case Granted(key, first_lacked):
                seq = self.reserving.pop(key)
                first = first_blocks(self._kv.managers, first_lacked, seq.num_prompt_tokens)
                seq.lease_id = self._leases.open(now_ms, key, sender, self, first)
                seq.first_unoffered = first
                self._run(now_ms, seq)
            case Refused(key):
                self._refused(now_ms, key)
            case Send() as release:
                self._out.add(release)

    def on_late_answer(self, sender: Incarnation, late: Reserved) -> None:
        """A grant after the prefill part ended: the reader must not wait for another request.

        While there is a lease that shows how it went, the grant is a repeated one and means
        nothing.
        """
        if late.granted and not self._leases.knows(late.key):
            self._out.add(Send(sender, Ended(late.key, "the prefill part is over")))

    # -- the lease ----------------------------------------------------------------------------

    def offer(self, now_ms: int, seq: Sequence, *, renew: bool) -> None:
        """A chunk is computed, more follow: offer what will not change, so the pull overlaps.

        ``renew``: prolong the lease where there is nothing to offer.
        """
        assert seq.lease_id is not None
        blocks, ends = complete_blocks(
            self._kv.managers, seq.key, seq.num_computed, seq.first_unoffered
        )
        if ends != seq.first_unoffered:
            seq.first_unoffered = ends
            self._leases.offer(now_ms, seq.lease_id, blocks)
        elif renew:
            self._leases.renew(now_ms, seq.lease_id, seq.num_computed)

    def seal(self, now_ms: int, seq: Sequence, first: SampledToken) -> None:
        """The prefill is complete: offer the rest the reader lacks and end the request here.

        The lease takes its hold in the same call that offers, before the request drops its own.
        """
        assert seq.lease_id is not None
        num_tokens = seq.num_prompt_tokens
        blocks = moved_blocks(self._kv.managers, seq.key, num_tokens, seq.first_unoffered)
        logprobs = first.logprobs or TokenLogprobs(0.0)
        self._leases.seal(
            now_ms, seq.lease_id, blocks, num_tokens, first.token_id, logprobs.logprob, logprobs.top
        )
        self._kv.free(seq.key)
        # From here on the lease's end is the reservation's: after a Release the reader would
        # wait for another request, which nobody will make.
        self._requests.handed_over(seq.key)
        self._generations.forget(seq)

    def on_take_over(self, now_ms: int, sender: Incarnation, message: TakeOver) -> None:
        """Let another reader take a sealed lease over, or refuse."""
        if self._answers.repeat(LeaseRequest(sender, message.key, message.number)):
            return
        old = self._leases.hand_over_of(message.old)
        num_tokens = old.seal.num_tokens if old and old.seal else 0
        first = first_blocks(self._kv.managers, message.first_lacked, num_tokens)
        self._answers.take_over(now_ms, sender, replace(message, first_lacked=first), self)
        lease = self._leases.hand_over_of(message.key)
        if lease is not None:
            # Of the budget that the old lease has just given back; never more than that. Where
            # the old one alone exceeded the bound the new one may go uncounted in its place.
            self._budget.take(lease.key, lease.num_blocks)

    def lease_committed(self, event: LeaseCommitted) -> None:
        """The decode worker has committed: it has every block."""
        self._budget.give_back(event.key)

    def lease_ended(self, event: LeaseEnded) -> None:
        """Release the reservation; the next tick ends the prefill, if it still runs.

        Not a prefill that was preempted since: it may have another lease by then.
        """
        self._ended_leases.append((event.key, event.lease_id))
        self._budget.give_back(event.key)
        self._release(event.key)

    # -- time ---------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> bool:
        """Time-outs of reservations, ends of leases, retries; whether somebody is queued again."""
        for answer in self._requests.tick(now_ms):
            if isinstance(answer, Refused):
                self._refused(now_ms, answer.key)
            else:
                self._out.add(answer)
        num_live = self._leases.num_live
        self._leases.expire(now_ms)
        if num_live > self._leases.num_live:
            self._counters.add("leases_expired", num_live - self._leases.num_live)
        ready = [seq for seq in self.backing_off if seq.retry_at_ms <= now_ms]
        self.backing_off = [seq for seq in self.backing_off if seq.retry_at_ms > now_ms]
        self._end_the_unleased()
        for seq in ready:
            if seq.passes > self._limits.reserve_passes_max:
                self.end(seq, EndReason.RESERVE_REFUSED, f"refused {seq.passes} times")
            else:
                self._batcher.requeue(seq)  # nobody who came later is before it
        return bool(ready)

    # -- ending -------------------------------------------------------------------------------

    def give_back(self, seq: Sequence, reason: str) -> None:
        """End reservation and lease of a sequence that goes no further here.

        The release goes first, so that the reader forgets the inbound transfer before it
        learns that the lease is dead.
        """
        self.reserving.pop(seq.key, None)
        if seq in self.backing_off:
            self.backing_off.remove(seq)
        seq.lease_id = None
        self._release(seq.key)
        self.end_lease(seq.key, reason)

    def end_lease(self, key: RequestKey, reason: str) -> None:
        """End the lease of a generation whose sequence may already be gone; idempotent."""
        self._leases.end_key(key, reason)
        self._budget.give_back(key)

    def on_peer_lost(self, peer: Incarnation) -> None:
        """Forget grants of a decode worker that is gone, and requests to it."""
        self._requests.on_peer_lost(peer)

    def end(
        self, seq: Sequence, reason: EndReason, message: str, *, tell_peer: bool = True
    ) -> None:
        """End a generation with its reservation and lease."""
        self.give_back(seq, reason)
        if tell_peer:
            self._out.add(Send(seq.peer.incarnation, Ended(seq.key, reason)))
        self._generations.end(seq, reason, message)

    # -- inside -------------------------------------------------------------------------------

    def _run(self, now_ms: int, seq: Sequence) -> None:
        seq.ready_ms = now_ms
        self._batcher.run(seq)

    def _end_the_unleased(self) -> None:
        """A lease that dies before its seal takes the prefill along; the router plans anew."""
        ended, self._ended_leases = self._ended_leases, []
        for key, lease_id in ended:
            seq = self._generations.sequences.get(key)
            if seq is not None and seq.lease_id == lease_id:
                self.end(seq, EndReason.LEASE_DEAD, "the lease ended before its seal")

    def _release(self, key: RequestKey) -> None:
        for release in self._requests.give_back(key):
            self._out.add(release)

    def _refused(self, now_ms: int, key: RequestKey) -> None:
        seq = self.reserving.pop(key, None)
        if seq is not None:
            self._back_off(now_ms, seq)

    def _back_off(self, now_ms: int, seq: Sequence) -> None:
        """Give everything back, then wait: never wait while holding."""
        self._kv.free(seq.key)
        self._budget.give_back(seq.key)
        seq.phase = Phase.BACKOFF
        seq.begins_at(0)
        seq.passes += 1
        self.num_refusals += 1
        seq.retry_at_ms = now_ms + self._random_delay_ms(seq.passes)
        self.backing_off.append(seq)
