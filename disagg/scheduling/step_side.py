"""Steps of this worker: who is in the next one, and what one that has ended brings."""

from collections.abc import Sequence as Tokens

from disagg.kv.blocks.hits import CacheHit
from disagg.messages.outputs import FinishReason, PromptLogprobs, SequenceOutput
from disagg.messages.sampling import SampledToken
from disagg.messages.session import EndReason, PrefillProgress
from disagg.messages.submit import Role
from disagg.scheduling.actions import ToRouter
from disagg.scheduling.drafts import accepted
from disagg.scheduling.handover.prefill_side import PrefillSide
from disagg.scheduling.handover.prefix_pull import PrefixPullSide
from disagg.scheduling.handover.worker_state import WorkerState
from disagg.scheduling.parts import Parts
from disagg.scheduling.prompt_scores import step_outputs
from disagg.scheduling.sequence import Phase, Sequence
from disagg.scheduling.step import Step, StepResult
from disagg.scheduling.tiers.tier_side import TierSide


class StepSide:
    """Plans steps, and accounts for those that have ended."""

    def __init__(
        self,
        worker: WorkerState,
        parts: Parts,
        prefill_side: PrefillSide,
        prefix_pull: PrefixPullSide,
        tiers: TierSide,
    ) -> None:
        self._kv, self._limits, self._out = worker.kv, worker.limits, worker.out
        self._batcher, self._generations = worker.batcher, worker.generations
        self._counters = worker.counters
        self._parts, self._prefill_side = parts, prefill_side
        self._prefix_pull, self._tiers = prefix_pull, tiers

    def plan(self, now_ms: int) -> Step | None:
        """The next batch, or None when there is nothing to compute or none may be launched."""
        if not self._batcher.may_launch:
            return None
        self._start(now_ms)
        step, preempted = self._batcher.build_step()
        for seq in preempted:
            if seq.role is Role.PREFILL:
                self._prefill_side.give_back(seq, "preempted")
            else:
                seq.preempted = True
                self._out.add(ToRouter(PrefillProgress(seq.key, 0, preempted=True)))
            self._parts.queue(seq)
        for part in step.slices if step else ():
            if part.is_new:
                self._generations.sequences[part.key].computed_from_ms = now_ms
        return step

    def begin_elsewhere(self, now_ms: int) -> None:
        """Let who needs something of others ask for it while a step runs.

        Those who ask when the next step is planned have their answer too late for that step.
        """
        waiting = self._batcher.waiting
        if self._batcher.num_in_flight and waiting and self._may_need_others(waiting[0]):
            self._start(now_ms, only_elsewhere=True)

    def _start(self, now_ms: int, *, only_elsewhere: bool = False) -> None:
        num_elsewhere = self._generations.num_holding - len(self._batcher.running)
        for seq in self._batcher.take_startable(
            num_elsewhere, self._reserve_elsewhere, only_elsewhere=only_elsewhere
        ):
            seq.turn_ms = now_ms
            if seq.phase is Phase.LOADING:
                self._tiers.begin(now_ms, seq)
            elif seq.phase is Phase.PULLING_PREFIX:
                self._prefix_pull.ask(now_ms, seq)
            else:
                self._prefill_side.start(now_ms, seq)

    def _may_need_others(self, seq: Sequence) -> bool:
        """Else its prefix is not looked up: it will be when the next step is planned."""
        return seq.role is Role.PREFILL or seq.pull is not None or self._tiers.has_any

    def _reserve_elsewhere(self, seq: Sequence, hit: CacheHit) -> bool:
        """Take the blocks of a sequence whose prefix comes from a tier or another worker."""
        if seq.is_scored:
            return False
        return self._tiers.reserve(seq, hit) or self._prefix_pull.reserve(seq, hit)

    def done(self, now_ms: int, result: StepResult) -> None:
        """Account for a finished step: publish, sample, finish, hand over."""
        step, sequences = self._batcher.complete(result.step_id)
        outputs: list[SequenceOutput] = []
        scored: list[PromptLogprobs] = []
        alive = [  # others were cancelled in between; the step's hold kept their blocks until now
            (i, seq, part.start + len(part.token_ids) - part.num_drafts)
            for i, (seq, part) in enumerate(zip(sequences, step.slices, strict=True))
            if self._generations.sequences.get(seq.key) is seq and seq.phase is Phase.RUNNING
        ]
        errors = result.errors or (result.error,) * len(step.slices)
        self._kv.publish_step([(seq.key, computed) for i, seq, computed in alive if not errors[i]])
        for i, seq, num_computed in alive:
            if errors[i]:
                self._parts.end(seq, EndReason.STEP_FAILED, errors[i])
                continue
            seq.num_computed = num_computed
            if result.prompt_logprobs and result.prompt_logprobs[i]:
                scores = seq.take_scores(step.slices[i].start, result.prompt_logprobs[i])
                scored += [scores] if scores is not None else []
            sample = result.samples[i]
            if sample is not None and sample.error:
                self._parts.end(seq, EndReason.NO_TOKEN, sample.error)
            elif sample is not None and seq.num_drafts:
                samples = accepted(step.slices[i], sample, result.after_drafts[i])
                outputs.append(self._sampled(now_ms, seq, samples))
            elif sample is not None:
                outputs.append(self._sampled(now_ms, seq, (sample,)))
            else:
                self._computed(now_ms, seq)
        self._tiers.pump(now_ms)
        # After the prefill reports, which belong to the first token's usage.
        keys = [*(one.key for one in outputs), *(one.key for one in scored)]
        for router in dict.fromkeys(key.router for key in keys):
            its_outputs = [one for one in outputs if one.key.router == router]
            its_scored = [one for one in scored if one.key.router == router]
            for message in step_outputs(its_outputs, its_scored):
                self._out.add(ToRouter(message))

    def _computed(self, now_ms: int, seq: Sequence) -> None:
        """A chunk is computed, more follow: offer it, and show those who wait that it goes on."""
        due = seq.shows_progress(now_ms, self._limits.progress_ms)
        if seq.role is Role.PREFILL:
            self._prefill_side.offer(now_ms, seq, renew=due)
        if due:
            self._out.add(ToRouter(PrefillProgress(seq.key, seq.num_computed)))

    def _sampled(self, now_ms: int, seq: Sequence, samples: Tokens[SampledToken]) -> SequenceOutput:
        """A step sampled a token, or more after right drafts: go on, finish, or hand over."""
        output = self._generations.emit(seq, *samples)
        if seq.num_drafts:
            self._drafted(seq, len(output.token_ids) - 1)
        self._kv.unpromise(seq.key)  # the prompt is complete; from here on memory is requested
        if not seq.prefill_reported:
            seq.prefill_reported = True
            self._out.add(ToRouter(seq.prefill_report(now_ms)))
        if output.finish_reason is not FinishReason.NONE:
            if seq.role is Role.PREFILL:
                self._prefill_side.give_back(seq, "token 0 ended the request")
            self._generations.forget(seq)
        elif seq.role is Role.PREFILL:
            self._prefill_side.seal(now_ms, seq, samples[0])
        return output

    def _drafted(self, seq: Sequence, num_right: int) -> None:
        """Of the drafts that a step computed the right ones count as computed tokens."""
        self._counters.add("draft_tokens", seq.num_drafts)
        self._counters.add("accepted_draft_tokens", num_right)
        seq.accept_drafts(num_right)
        self._kv.slots.accept_drafts(seq.key, num_right)
        self._kv.publish(seq.key, seq.num_computed)
