"""Which sequences run, and the packed batch of the next step (continuous batching).

Chunked prefill: a step carries the decode tokens of every running sequence first, then prompt
chunks, up to ``max_step_tokens``. A step holds every block it reads or writes until its completion
is known.

Up to ``steps_max`` steps are in flight, and end in the order of their launch: a step is planned and
launched while the one before it runs. A prompt's next chunk goes with it, and so does a sequence
whose next token the running step samples, with a `PLACEHOLDER` in its place. What cannot be
foreseen, a stop token, a cancel or a failed step, ends a sequence that a later step computes
already: that step still holds the blocks, and what it brings for this sequence counts for nothing.
Memory is taken from a sequence only while no step is in flight, as what runs gives up nothing
before its end: who lacks memory lets the steps end first, and nothing is launched meanwhile.

Memory goes to prompts strictly by arrival; the tokens of a step are shared. The oldest prompt gets
half of what the decodes leave, the other half goes to whoever was served least recently, as much as
each needs, and what is left of it to the oldest again. As the oldest a prompt takes at most twice
the steps that it would take alone: so it is complete after at most twice the steps of those before
it and its own, however many come later. And of *n* prompts that run each is served at least once in
*n* steps, however long the others are: who is served moves behind it. Where the decodes leave a
single token, the oldest has it.

Of a model with linear states a chunk ends where a state can be kept, if such an end is within its
share (`Chunking.chunk_end`); the oldest prompt's half grows to the next one. So what
follows a prompt's last block end is a chunk of its own: the price, a short step more, at which a
repeated or longer prompt is found whole.
"""

from collections import deque
from collections.abc import Callable, Iterator

from disagg.errors import InvariantViolation
from disagg.kv.blocks.hits import CacheHit
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.messages.identity import RequestKey
from disagg.messages.submit import Role
from disagg.scheduling.block_tables import SentTables
from disagg.scheduling.drafts import draft_of, waits_to_draft
from disagg.scheduling.limits import WorkerLimits
from disagg.scheduling.sequence import Phase, Sequence
from disagg.scheduling.step import PLACEHOLDER, SequenceSlice, Step


class Batcher:
    """The queue of those who hold nothing and the list of those who run."""

    def __init__(self, coordinator: KVCacheCoordinator, limits: WorkerLimits) -> None:
        self._kv = coordinator
        self._limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_returning: Callable[[], int] = int
        """Blocks that are being copied out, and become free without anybody's doing."""
        self._next_step_id = 0
        self._in_flight: deque[tuple[Step, tuple[Sequence, ...]]] = deque()
        self._lets_steps_end = False
        self._ended: list[RequestKey] = []
        """Those of earlier steps that gave their blocks up; the next step names them."""

    @property
    def preempted_waiting(self) -> bool:
        """An older, preempted decode waits for memory; nothing new may take it."""
        return any(seq.preempted for seq in self.waiting)

    @property
    def num_in_flight(self) -> int:
        """Steps that were launched and whose completion is not yet known."""
        return len(self._in_flight)

    @property
    def may_launch(self) -> bool:
        """Another step may be launched now."""
        if self._lets_steps_end:
            return not self._in_flight
        return len(self._in_flight) < self._limits.steps_max

    def let_steps_end(self) -> None:
        """Launch nothing before all steps in flight have ended."""
        self._lets_steps_end = True

    def enqueue(self, seq: Sequence) -> None:
        """Queue behind the others; a preempted decode goes before all that have not started."""
        seq.phase = Phase.WAITING
        if not seq.preempted:
            self.waiting.append(seq)
            return
        index = sum(1 for other in self.waiting if other.preempted and other.arrival < seq.arrival)
        self.waiting.insert(index, seq)

    def requeue(self, seq: Sequence) -> None:
        """Put a sequence that gave everything back where it was: before those that came later."""
        seq.phase = Phase.WAITING
        later = (n for n, one in enumerate(self.waiting) if not one.preempted)
        places = (n for n in later if self.waiting[n].arrival > seq.arrival)
        self.waiting.insert(next(places, len(self.waiting)), seq)

    def run(self, seq: Sequence) -> None:
        """Let a sequence that holds its blocks take part in steps."""
        seq.phase = Phase.RUNNING
        seq.preempted = False
        seq.sent_tables = None
        self.running.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence wherever it is; its blocks are the caller's business."""
        if seq in self.running:
            self.running.remove(seq)
            if seq.sent_tables is not None:
                seq.sent_tables = None
                self._ended.append(seq.key)
        elif seq in self.waiting:
            self.waiting.remove(seq)

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks; it is in nobody's list then.

        Raises:
            InvariantViolation: a step in flight may be sampling for it.
        """
        if self._in_flight:
            raise InvariantViolation(f"{seq.key} is preempted while a step is in flight")
        self.remove(seq)
        self._kv.free(seq.key)
        seq.begins_at(0)
        self.num_preemptions += 1

    def take_startable(
        self,
        num_elsewhere: int,
        reserve_pull: Callable[[Sequence, CacheHit], bool],
        *,
        only_elsewhere: bool = False,
    ) -> Iterator[Sequence]:
        """Yield queued sequences that got the blocks of their whole prompt.

        Each yielded one has left the queue and holds its cache hits and a promise of the rest;
        the caller must run it or give it back. Stops at the first that does not fit, so nobody
        overtakes for memory. ``num_elsewhere`` sequences hold blocks outside ``running``.
        ``reserve_pull`` may take the blocks instead, for one whose prefix is to be pulled. With
        ``only_elsewhere`` it stops too at the first that needs nothing of anybody else.
        """
        if only_elsewhere and self._lets_steps_end:
            return
        while self.waiting:
            seq = self.waiting[0]
            if len(self.running) + num_elsewhere >= self._limits.max_sequences:
                return
            hit = self._kv.find_longest_cache_hit(seq.request, seq.num_cacheable)
            pulls = reserve_pull(seq, hit)
            if only_elsewhere and not pulls and seq.role is not Role.PREFILL:
                return
            if not pulls and not self._kv.admit(seq.key, seq.num_tokens, hit):
                return
            self.waiting.popleft()
            seq.known_end = self._kv.chunking.known_end(seq.request)
            if not pulls:
                seq.starts_from(hit.num_tokens)
            yield seq
            if seq.phase is not Phase.RUNNING:
                num_elsewhere += 1

    def build_step(self) -> tuple[Step | None, list[Sequence]]:
        """Allocate for the next step and launch it.

        Returns the step (None when there is nothing to compute or none may be launched) and the
        sequences that were preempted for it: they hold nothing and are in nobody's list.
        """
        if not self.may_launch:
            return None, []
        self._lets_steps_end = False
        chosen: list[tuple[Sequence, int]] = []
        preempted: list[Sequence] = []
        oldest_first = sorted(self.running, key=lambda seq: seq.arrival)
        decodes = [seq for seq in oldest_first if seq.num_unscheduled == 1]
        drafts = self._drafts_now()
        if drafts:
            decodes = [seq for seq in decodes if not waits_to_draft(seq)]
        budget = self._add_decodes(decodes, chosen, preempted)
        for seq, num_new in self._share_among_prompts(budget):
            if self._lets_steps_end:
                break
            if seq not in preempted and self._make_room(seq, num_new, chosen, preempted):
                chosen.append((seq, num_new))
        if not chosen:
            return None, preempted
        slices = []
        for seq, num_new in chosen:
            draft = draft_of(seq, self._kv, budget) if drafts else ()
            budget -= len(draft)
            slices.append(self._slice(seq, num_new, draft))
        step = Step(self._next_step_id, tuple(slices), tuple(self._ended))
        self._ended.clear()
        self._next_step_id += 1
        sequences = tuple(seq for seq, _ in chosen)
        self._kv.hold_step(step.step_id, [seq.key for seq in sequences])
        self._in_flight.append((step, sequences))
        return step, preempted

    def complete(self, step_id: int) -> tuple[Step, tuple[Sequence, ...]]:
        """The engine is done with the oldest step; its holds are dropped."""
        if not self._in_flight or self._in_flight[0][0].step_id != step_id:
            in_flight = [step for step, _ in self._in_flight]
            raise InvariantViolation(f"step {step_id} completed, in flight: {in_flight}")
        step, sequences = self._in_flight.popleft()
        self._kv.release_step(step_id)
        return step, sequences

    def _drafts_now(self) -> bool:
        """Whether sequences may draft in the next step: no prompt's chunk is in it."""
        return self._kv.num_lookahead_tokens > 0 and not any(
            seq.num_unscheduled > 1 for seq in self.running
        )

    def _slice(self, seq: Sequence, num_new: int, draft: tuple[int, ...]) -> SequenceSlice:
        start, end = seq.num_scheduled, seq.num_scheduled + num_new
        seq.num_scheduled, seq.num_drafts = end, len(draft)
        is_new = seq.sent_tables is None
        sent = seq.sent_tables = seq.sent_tables or SentTables(self._kv, seq.key)
        return SequenceSlice(
            key=seq.key,
            token_ids=(*seq.request.token_ids[start:end], *draft) or (PLACEHOLDER,),
            start=start,
            is_new=is_new,
            table_changes=sent.take_changes(),
            sampling=seq.submit.sampling if end >= seq.num_tokens else None,
            known_token_ids=tuple(seq.request.token_ids) if is_new else (),
            num_drafts=len(draft),
            scored_token_ids=seq.scored_in(start, end),
            num_prompt_logprobs=seq.submit.sampling.num_prompt_logprobs or 0,
        )

    def _add_decodes(
        self,
        decodes: list[Sequence],
        chosen: list[tuple[Sequence, int]],
        preempted: list[Sequence],
    ) -> int:
        """A token for each, all in one call unless memory is short; returns the budget left.

        None is left when somebody waits for memory: nobody younger takes it then.
        """
        budget = self._limits.max_step_tokens
        while decodes and budget:
            first = [seq.request for seq in decodes[:budget]]
            served = self._kv.allocate_decodes(first)
            chosen += [(seq, 1) for seq in decodes[:served]]
            budget -= served
            decodes = decodes[served:]
            if served < len(first):
                seq = decodes.pop(0)
                if self._make_room(seq, 1, chosen, preempted):
                    chosen.append((seq, 1))
                    budget -= 1
                if self._lets_steps_end:
                    return 0
                decodes = [seq for seq in decodes if seq not in preempted]
        return budget

    def _share_among_prompts(self, budget: int) -> list[tuple[Sequence, int]]:
        """Tokens of each prompt in this step, the oldest one's first.

        Who is served besides the oldest moves to the end of ``running``.
        """
        prompts = [seq for seq in self.running if seq.num_unscheduled > 1]
        if not prompts or not budget:
            return []
        oldest = min(prompts, key=lambda seq: seq.arrival)
        half, every = budget - budget // 2, self._kv.alignment_tokens
        left = budget - self._chunk(oldest, half, min(half + every, budget) - 1)
        shares: list[tuple[Sequence, int]] = []
        for seq in prompts:
            if seq is oldest:
                continue
            if not left:
                break
            num_new = self._chunk(seq, left, left)
            left -= num_new
            shares.append((seq, num_new))
        if shares:
            served = {seq.key for seq, _ in shares}
            self.running.sort(key=lambda seq: seq.key in served)
        num_new = budget - sum(num for _, num in shares)
        return [(oldest, self._chunk(oldest, num_new, num_new)), *shares]

    def _chunk(self, seq: Sequence, share: int, room: int) -> int:
        """Tokens of a prompt's next chunk: a share, or as much of the room as keeps a state."""
        start = seq.num_scheduled
        end = self._kv.chunking.chunk_end(seq.request, seq.known_end, start, room)
        return min(seq.num_unscheduled, share) if end is None else end - start

    def _make_room(
        self,
        seq: Sequence,
        num_new: int,
        chosen: list[tuple[Sequence, int]],
        preempted: list[Sequence],
    ) -> bool:
        """Allocate, preempting the youngest until it fits; at last the sequence itself.

        While steps are in flight nobody is preempted: they are let end first. Nor while blocks
        are being copied out: who lacks them is in no step until they have come back.
        """
        while not self._kv.allocate(seq.request, num_new_tokens=num_new):
            if self._in_flight:
                self.let_steps_end()
                return False
            if self.num_returning():
                return False
            in_step = {id(other) for other, _ in chosen}
            victims = [s for s in self.running if id(s) not in in_step]
            victim = max(victims, key=lambda s: s.arrival)
            self.preempt(victim)
            preempted.append(victim)
            if victim is seq:
                return False
        return True
