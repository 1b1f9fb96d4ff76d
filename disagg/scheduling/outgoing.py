"""Blocks that leave this worker: hand-overs of its prefills, and cached prefixes others pull.

A hand-over reserves before it computes, then leases, then seals.
"""

from collections.abc import Callable

from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.prefix_sharing import PrefixSharing, WantedPrefix
from disagg.messages.identity import Incarnation, Question, RequestKey
from disagg.messages.peer import (
    AskLease,
    AskOffers,
    Commit,
    CommitSeen,
    Ended,
    Reserved,
    TakeOver,
    WithdrawLease,
)
from disagg.messages.sampling import SampledToken, TokenLogprobs
from disagg.messages.session import PeerAddress
from disagg.scheduling.admission import num_blocks_for
from disagg.scheduling.counters import Counters
from disagg.scheduling.limits import WorkerLimits
from disagg.scheduling.sequence import Phase, Sequence
from disagg.scheduling.share import HandoverShare
from disagg.transfer.actions import LeaseAction, LeaseCommitted, LeaseEnded, Send
from disagg.transfer.asked_leases import AskedLeases
from disagg.transfer.leases import LeaseTable
from disagg.transfer.reserving import Granted, Refused, ReserveAsker


def peer_of(seq: Sequence) -> PeerAddress:
    """The other worker of a hand-over; `Submit` was checked to name one."""
    assert seq.submit.peer is not None
    return seq.submit.peer


class Outgoing:
    """Leases of this worker and the prefills that feed them.

    ``random_delay_ms(passes)`` is drawn at every refusal: a deterministic back-off livelocks two
    workers that prefill for each other.
    """

    def __init__(
        self,
        coordinator: KVCacheCoordinator,
        prefixes: PrefixSharing,
        leases: LeaseTable,
        share: HandoverShare,
        limits: WorkerLimits,
        random_delay_ms: Callable[[int], int],
        counters: Counters,
    ) -> None:
        self._kv = coordinator
        self._leases = leases
        self._prefixes = prefixes
        self.asked = AskedLeases(leases, limits.committed_max)
        self._asker = ReserveAsker(timeout_ms=limits.reserve_timeout_ms)
        self._share = share
        self._random_delay_ms = random_delay_ms
        self._counters = counters
        self.reserving: dict[RequestKey, Sequence] = {}
        self.backing_off: list[Sequence] = []
        self.num_refusals = 0
        self._ended_leases: list[tuple[RequestKey, int]] = []

    def reserve(self, now_ms: int, seq: Sequence) -> list[Send]:
        """Ask the decode worker for its blocks; own blocks are already promised.

        When the share is used up the sequence backs off at once and holds nothing.
        """
        if not self._share.take(seq.key, num_blocks_for(self._kv, seq.num_tokens)):
            self._back_off(now_ms, seq)
            return []
        seq.phase = Phase.RESERVING
        self.reserving[seq.key] = seq
        return [self._asker.ask(now_ms, seq.key, peer_of(seq).incarnation)]

    def on_reserved(
        self, now_ms: int, sender: Incarnation, message: Reserved
    ) -> tuple[list[Send], Sequence | None]:
        """Handle the answer; returns the sequence that may now run, if the answer was a yes."""
        match self._asker.on_answer(now_ms, sender, message):
            case Granted(key, first_lacked):
                seq = self.reserving.pop(key)
                seq.lease_id = self._leases.open(now_ms, key, sender, first_lacked)
                seq.first_unoffered = first_lacked
                return [], seq
            case Refused() as refused:
                self._refuse(now_ms, refused)
            case Send() as release:
                return [release], None
        return [], None

    def on_late_answer(self, sender: Incarnation, late: Reserved) -> list[Send]:
        """A yes after the prefill part ended: the reader must not wait for another question.

        While there is a lease that says how it went, the yes is a repeated one and means nothing.
        """
        if not late.granted or self._leases.knows(late.key):
            return []
        return [Send(sender, Ended(late.key, "the prefill part is over"))]

    def tick(self, now_ms: int) -> tuple[list[Send], list[Sequence]]:
        """Time-outs of reservations, ends of leases; returns who may queue again."""
        actions: list[Send] = []
        for answer in self._asker.tick(now_ms):
            if isinstance(answer, Refused):
                self._refuse(now_ms, answer)
            else:
                actions.append(answer)
        expired = self._leases.expire(now_ms)
        if expired:
            num_leases = sum(isinstance(action, LeaseEnded) for action in expired)
            self._counters.add("leases_expired", num_leases)
        actions += self._take_events(expired)
        ready = [seq for seq in self.backing_off if seq.retry_at_ms <= now_ms]
        self.backing_off = [seq for seq in self.backing_off if seq.retry_at_ms > now_ms]
        return actions, ready

    def offer(self, now_ms: int, seq: Sequence) -> list[Send]:
        """A chunk is computed, more follow: offer what will not change, so the pull overlaps.

        Only kinds that see everything: of the others the reader needs the end of the prompt.
        """
        assert seq.lease_id is not None
        tables = self._kv.block_table(seq.key)
        ends = tuple(
            max(first, manager.num_settled(seq.num_computed))
            for manager, first in zip(self._kv.managers, seq.first_unoffered, strict=True)
        )
        blocks = tuple(
            tuple(enumerate(table[first:end], first))
            for table, first, end in zip(tables, seq.first_unoffered, ends, strict=True)
        )
        if ends == seq.first_unoffered:
            return []
        seq.first_unoffered = ends
        return self._take_events(self._leases.offer(now_ms, seq.lease_id, blocks))

    def seal(self, now_ms: int, seq: Sequence, first: SampledToken) -> list[Send]:
        """The prefill is complete: offer the rest the reader lacks and end the request here.

        The lease takes its hold in the same call that offers, before the request drops its own.
        """
        assert seq.lease_id is not None
        needed = self._kv.in_window_blocks(seq.key, seq.num_prompt_tokens)
        blocks = tuple(
            tuple((position, block) for position, block in group if position >= first)
            for group, first in zip(needed, seq.first_unoffered, strict=True)
        )
        logprobs = first.logprobs or TokenLogprobs(0.0)
        actions = self._leases.seal(
            now_ms,
            seq.lease_id,
            blocks,
            num_tokens=seq.num_prompt_tokens,
            first_token_id=first.token_id,
            first_logprob=logprobs.logprob,
            first_top_logprobs=logprobs.top,
        )
        self._kv.free(seq.key)
        # From here on the lease's end is the reservation's: after a Release the reader would
        # wait for another question, which nobody will ask.
        self._asker.handed_over(seq.key)
        return self._take_events(actions)

    def give_back(self, seq: Sequence, reason: str) -> list[Send]:
        """End reservation and lease of a sequence that goes no further here.

        The release goes first, so that the reader forgets the inbound transfer before it hears
        that the lease is dead.
        """
        self.reserving.pop(seq.key, None)
        if seq in self.backing_off:
            self.backing_off.remove(seq)
        seq.lease_id = None
        released: list[Send] = list(self._asker.give_back(seq.key))
        return released + self.end_lease(seq.key, reason)

    def end_lease(self, key: RequestKey, reason: str) -> list[Send]:
        """End the lease of a generation whose sequence may already be gone; idempotent."""
        actions = self._take_events(self._leases.end_key(key, reason))
        self._share.give_back(key)
        return actions

    def on_ended(self, sender: Incarnation, ended: Ended) -> list[Send]:
        """The reader of a sealed lease ended its part; anybody else changes nothing."""
        return self._take_events(self._leases.on_ended(sender, ended))

    def on_open(
        self, now_ms: int, sender: Incarnation, message: AskLease, *, refuse: bool
    ) -> list[Send]:
        """Match a cached prefix and hold it for the reader in one call, or answer none.

        Only blocks that nobody was promised are lent, and no more than the share. ``refuse``:
        an older request waits for memory here.
        """
        question = Question(sender, message.key, message.number)
        again = self.asked.repeated(question)
        if again is not None:
            return self._take_events(again)
        wanted = WantedPrefix(
            message.num_tokens, message.first_hash, message.hashes, message.first_lacked
        )
        shared = None if refuse else self._prefixes.match(wanted)
        if shared is not None:
            blocks = [block for pairs in shared.blocks for _, block in pairs]
            pool = self._kv.pool
            cost = pool.num_leaving(blocks) + pool.slack_if_touched(blocks)
            fits = cost <= self._kv.num_available_blocks
            if fits and self._share.take(question, len(blocks)):
                return self._take_events(
                    self.asked.open_sealed(now_ms, question, shared.blocks, shared.num_tokens)
                )
        return self._take_events(self.asked.refuse(question))

    def on_transfer(self, now_ms: int, sender: Incarnation, message: TakeOver) -> list[Send]:
        """Another reader takes a sealed lease over, or is told that it cannot."""
        again = self.asked.repeated(Question(sender, message.key, message.number))
        if again is not None:
            return self._take_events(again)
        actions = self._take_events(self.asked.transfer(now_ms, sender, message))
        lease = self._leases.hand_over_of(message.key)
        if lease is not None:
            # Of the share that the old lease has just given back; never more than that.
            self._share.take(lease.key, lease.num_blocks)
        return actions

    def on_withdraw(self, sender: Incarnation, message: WithdrawLease) -> list[Send]:
        """A reader gave its question up."""
        return self._take_events(self.asked.on_withdraw(sender, message))

    def on_lease_message(
        self, sender: Incarnation, message: AskOffers | Commit | CommitSeen
    ) -> list[Send]:
        """Answer the reader."""
        if isinstance(message, Commit):
            return self._take_events(self._leases.on_commit(sender, message))
        if isinstance(message, AskOffers):
            return self._take_events(self._leases.on_ask(sender, message))
        self._leases.on_seen(sender, message)
        return []

    def on_peer_lost(self, now_ms: int, peer: Incarnation) -> list[Send]:
        """Every reservation and lease of that reader ends; the caller ends the sequences."""
        self._asker.on_peer_lost(peer)
        self.asked.on_peer_lost(peer)
        return self._take_events(self._leases.on_peer_lost(now_ms, peer))

    def take_ended_leases(self) -> list[tuple[RequestKey, int]]:
        """Leases that ended since the last call: generation and id; their prefills are over.

        Not a prefill that was preempted since: it may have another lease by now.
        """
        ended, self._ended_leases = self._ended_leases, []
        return ended

    def _take_events(self, actions: list[LeaseAction]) -> list[Send]:
        """Act on what concerns this worker only; what is left goes to the peer."""
        out: list[Send] = []
        for action in actions:
            match action:
                case LeaseEnded(pull=Question() as pull) | LeaseCommitted(pull=Question() as pull):
                    self._share.give_back(pull)
                case LeaseEnded(key, lease_id):
                    self._ended_leases.append((key, lease_id))
                    self._share.give_back(key)
                    out += self._asker.give_back(key)
                case LeaseCommitted(key):
                    self._share.give_back(key)
                case Send():
                    out.append(action)
        return out

    def _refuse(self, now_ms: int, refused: Refused) -> None:
        seq = self.reserving.pop(refused.key, None)
        if seq is not None:
            self._back_off(now_ms, seq)

    def _back_off(self, now_ms: int, seq: Sequence) -> None:
        """Give everything back, then wait: never wait while holding."""
        self._kv.free(seq.key)
        self._share.give_back(seq.key)
        seq.phase = Phase.BACKOFF
        seq.num_computed = 0
        seq.passes += 1
        self.num_refusals += 1
        seq.retry_at_ms = now_ms + self._random_delay_ms(seq.passes)
        self.backing_off.append(seq)
