"""What was measured of workers and links, fitted; the router's only memory of speed."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from disagg.messages.identity import Incarnation
from disagg.messages.reports import PrefillReport, TransferKind, TransferReport
from disagg.messages.stats import WorkerStats
from disagg.messages.step_times import NUM_FEATURES, PAIRS, SCALE_TOKENS, StepTimes
from disagg.routing.estimates.answers import Answers
from disagg.routing.estimates.arrivals import Arrivals, Newcomers
from disagg.routing.estimates.by_worker import ByWorker
from disagg.routing.estimates.estimate import ANSWER_TOKENS, Estimate
from disagg.routing.estimates.fading_mean import IDLE_HALF_LIFE_MS, OUTLIER_TIMES, FadingMean
from disagg.routing.estimates.least_squares import FadingFit
from disagg.routing.estimates.links import Links
from disagg.routing.estimates.place import LinkCost, Place, StepCost
from disagg.routing.estimates.prompt_shares import PromptShares
from disagg.routing.generation import Generation
from disagg.routing.worker import Worker

STEPS_HALF_LIFE = 500.0
FLEET_STEPS_HALF_LIFE = 100_000.0
USUAL_MS = 4.0
"""Of messages and commits less than this is no outlier: many take no whole millisecond."""
BORROWED_STEPS = 16.0
"""A worker is as all are until it has done more than so many itself."""
WEIGHT_MIN = 0.01
"""Steps of which less is left fade no more; a step may have taken a thousand times as long as most.
"""
USUAL_STEPS = 500
"""From so many on it is known what is usual."""
_FEATURES = tuple(PAIRS.index((0, feature)) for feature in range(NUM_FEATURES))
_TOKENS, _CONTEXT = PAIRS.index((0, 1)), PAIRS.index((0, 2))
_DECODES = PAIRS.index((3, 3))
_DECODES_CONTEXT = PAIRS.index((3, 4))


@dataclass(slots=True)
class _Measured:
    """One worker's steps."""

    revision: str
    last: StepTimes = field(default_factory=StepTimes)
    fit: FadingFit = field(default_factory=lambda: FadingFit(NUM_FEATURES, STEPS_HALF_LIFE))
    faded_ms: int = 0
    """When there were new steps, or those before have faded for lack of them."""

    def fade(self, now_ms: int) -> None:
        """Let steps count less that are long ago, by whole half-lives.

        When their cost is asked: a worker without anything to do says nothing.
        """
        if num_halved := (now_ms - self.faded_ms) // IDLE_HALF_LIFE_MS:
            self._idle(num_halved * IDLE_HALF_LIFE_MS)
            self.faded_ms += num_halved * IDLE_HALF_LIFE_MS

    def add(self, now_ms: int, new: StepTimes) -> None:
        """There were new steps; those before count less by the time that these did not take.

        Else a few prompts, each within ten seconds of the last one, would keep it slow for ever.
        """
        self._idle(now_ms - self.faded_ms - new.timed[0])
        self.faded_ms = now_ms
        self.fit.add(new.num_steps, new.products, new.timed)

    def _idle(self, ms: float) -> None:
        """Nothing was computed for so long; steps of which little is left stay as they are."""
        if ms > 0 and self.fit.weight > WEIGHT_MIN:
            self.fit.fade(max(0.5 ** (ms / IDLE_HALF_LIFE_MS), WEIGHT_MIN / self.fit.weight))


class Speeds:
    """Fits of what workers report: of each one, of each pair, and of all where one has none yet.

    A figure that nobody has measured is not made up: then there is no cost, and no estimate.

    Attributes:
        answers: who decodes where, told by who begins and ends requests.
        waiting: plans of requests that wait at the router, by who would compute their prompts, told
            by who lets them wait.
    """

    def __init__(self) -> None:
        self._workers: dict[Incarnation, _Measured] = {}
        self._fleet: dict[str, FadingFit] = {}
        """By revision."""
        self._links = Links()
        self._message_ms, self._commit_ms = FadingMean(USUAL_MS), FadingMean(USUAL_MS)
        self._pull_ms, self._reserve_ms = FadingMean(USUAL_MS), FadingMean(USUAL_MS)
        self._answer_tokens = FadingMean()
        self._prompt_tokens, self._found_tokens = FadingMean(), FadingMean()
        self._arrivals = Arrivals()
        self.answers = Answers()
        self.waiting = ByWorker[Estimate]()
        self._shares = PromptShares()
        self._now_ms = 0

    # --- what comes in

    def stats(self, now_ms: int, worker: Worker, stats: WorkerStats) -> None:
        """A worker's sums came; what is new of them is counted."""
        self.now(now_ms)
        if stats.step_times is None:
            return
        name, revision = worker.info.incarnation, worker.info.revision
        known = self._workers.get(name)
        if known is None:
            known = self._workers[name] = _Measured(revision)
        new = stats.step_times.since(known.last)
        known.last = stats.step_times
        if new is None:
            return
        fleet = self._fleet.get(revision)
        if fleet is None:
            fleet = self._fleet[revision] = FadingFit(NUM_FEATURES, FLEET_STEPS_HALF_LIFE)
        known.add(now_ms, new)
        fleet.add(new.num_steps, new.products, _as_usual(fleet, new))
        products = new.products
        self._shares.computed(now_ms, worker.info, products[_TOKENS], products[_CONTEXT])

    def now(self, now_ms: int) -> None:
        """Time has gone by: what a worker did lately fades."""
        self._now_ms = max(self._now_ms, now_ms)

    def forget(self, worker: Incarnation) -> None:
        """A worker has left; what was measured with it stays a part of the fleet's figures."""
        left = self._workers.pop(worker, None)
        self._shares.forget(worker)
        self._links.forget(worker)
        if left and all(one.revision != left.revision for one in self._workers.values()):
            self._fleet.pop(left.revision, None)

    def report(self, generation: Generation, report: PrefillReport | TransferReport) -> None:
        """A worker's report on a plan came: how long its READ took, and messages on their way."""
        if isinstance(report, TransferReport):
            if not report.failed:
                self._transferred(generation, report)
            return
        if generation.taken_over is None:
            self._prompt_tokens.add(self._now_ms, report.num_prompt_tokens)
            self._found_tokens.add(self._now_ms, report.hit_tokens + report.pulled_tokens)
        times = report.times
        if times is None or generation.prefill_ms is None or generation.taken_over is not None:
            return
        took_ms = generation.prefill_ms - generation.started_ms
        self._message_ms.add(
            self._now_ms, took_ms - times.queue_ms - times.transfer_ms - times.compute_ms
        )
        if report.pulled_tokens:
            if generation.pull is not None and not generation.pull.failed:
                reserve_ms = 0.0 if generation.local else self.reserve_ms
                self._pull_ms.add(
                    self._now_ms, times.transfer_ms - generation.pull.read_ms - reserve_ms
                )
        elif not generation.local:
            self._reserve_ms.add(self._now_ms, times.transfer_ms)

    def planned(
        self, now_ms: int, worker: Incarnation, estimate: Estimate | None, slo_ttft_ms: int
    ) -> None:
        """A prompt goes to a worker for the first time; without an estimate it says nothing."""
        if estimate is not None:
            self._arrivals.add(now_ms, estimate.prefill_ms, slo_ttft_ms)
            self._shares.planned(worker, estimate)

    def answered(self, num_tokens: int) -> None:
        """A request ended after so many tokens; without any it says nothing."""
        if num_tokens:
            self._answer_tokens.add(self._now_ms, num_tokens)

    def _transferred(self, generation: Generation, report: TransferReport) -> None:
        num_bytes = sum(group.pulled_bytes for group in report.groups)
        is_pull = report.kind is TransferKind.PREFIX
        # Else READs of a hand-over began during the prefill, and waited for it in between.
        is_after_seal = is_pull or report.read_ms <= report.exposed_ms
        num_bursts, reading_ms = report.num_bursts, report.reading_ms
        if not num_bursts:  # an earlier release says nothing of the pauses
            num_bursts, reading_ms = int(is_after_seal), report.read_ms
        if not num_bytes or not num_bursts:
            return
        reader = generation.prefill if is_pull else generation.decode
        counts = self._links.read(
            self._now_ms,
            report.owner,
            reader.incarnation,
            num_bytes / num_bursts,
            reading_ms / num_bursts,
        )
        if counts and is_after_seal and not is_pull:
            self._commit_ms.add(self._now_ms, report.exposed_ms - report.read_ms)

    # --- what is asked

    @property
    def message_ms(self) -> float:
        """A plan's messages on their way, all together."""
        return self._message_ms.at(self._now_ms)

    @property
    def reserve_ms(self) -> float:
        """A reservation at a decode worker."""
        return self._reserve_ms.at(self._now_ms)

    @property
    def pull_ms(self) -> float:
        """A pull besides its READ: its lease at an owner that is busy, its commit."""
        return self._pull_ms.at(self._now_ms)

    @property
    def commit_ms(self) -> float:
        """From the last READ of a hand-over to its commit."""
        return self._commit_ms.at(self._now_ms)

    @property
    def answer_tokens(self) -> float:
        """Of the answers that ended lately, on average; at most `ANSWER_TOKENS`."""
        return min(self._answer_tokens.at(self._now_ms) or ANSWER_TOKENS, ANSWER_TOKENS)

    @property
    def found_share(self) -> float:
        """Of the tokens of prompts that came lately, what was in some cache; 0 to 1."""
        num_tokens = self._prompt_tokens.at(self._now_ms)
        return min(1.0, self._found_tokens.at(self._now_ms) / num_tokens) if num_tokens else 0.0

    def newcomers(self, slo_ttft_ms: int) -> Newcomers:
        """See `Arrivals.newcomers`."""
        return self._arrivals.newcomers(self._now_ms, slo_ttft_ms)

    def step_cost(self, worker: Worker) -> StepCost | None:
        """What a worker's steps take; what it has never done, by what others took for it."""
        fleet = self._fleet.get(worker.info.revision)
        if fleet is None:
            return None
        known = self._workers.get(worker.info.incarnation)
        if known is None:
            found = fleet.coefficients()
        else:
            known.fade(self._now_ms)
            found = known.fit.coefficients(fleet, BORROWED_STEPS)
        step, token, context, decode, decode_context = found
        if step is None or token is None or decode is None:
            return None
        return StepCost(step, token, context or 0.0, decode, decode_context or 0.0)

    def link_cost(self, owner: Incarnation, reader: Incarnation) -> LinkCost | None:
        """What a READ takes between two workers; by all pairs where these have not done enough."""
        return self._links.cost(self._now_ms, owner, reader)

    def place(self, worker: Worker) -> Place | None:
        """A worker as far as times go; None where nobody has measured enough.

        What went to prompts lately is as of the time that it was told last, see `now`.
        """
        cost, stats = self.step_cost(worker), worker.stats
        if cost is None or stats is None:
            return None
        tokens, num_waiting = worker.prefill_queue
        known = self._workers.get(worker.info.incarnation)
        context, step_tokens = 0.0, 0
        if known is not None:
            step_tokens = known.last.step_tokens_max
            if decodes := known.fit.mean_product(_DECODES):
                context = SCALE_TOKENS * known.fit.mean_product(_DECODES_CONTEXT) / decodes
        return Place(
            cost=cost,
            num_running=worker.num_decoding,
            context_tokens=context,
            num_queued_tokens=tokens,
            num_queued=worker.num_prompts_queued,
            num_requests=worker.decode_load,
            sequences_max=worker.info.max_sequences,
            step_tokens_max=step_tokens,
            num_coming=worker.num_coming,
            num_blocks_used=stats.num_blocks_usable - stats.num_blocks_free,
            num_blocks_free=stats.num_blocks_free,
            num_holding=stats.num_running + stats.num_reservations + stats.num_leases,
            num_waiting=num_waiting,
            prompt_share=self._shares.share(self._now_ms, worker.info, cost),
            long_prompts=self._shares.long_prompts(
                self._now_ms, worker.info, cost, self.waiting.at(worker.info.incarnation)
            ),
            answers=self.answers.at(self._now_ms, worker.info.incarnation, self.answer_tokens),
        )


def _as_usual(fit: FadingFit, new: StepTimes) -> Sequence[float]:
    """Times of steps as far as they count for all: one that hung says nothing of other workers."""
    if fit.num_added < USUAL_STEPS:
        return new.timed
    costs = fit.coefficients()
    usual_ms = sum((costs[i] or 0.0) * new.products[at] for i, at in enumerate(_FEATURES))
    share = OUTLIER_TIMES * usual_ms / new.timed[0] if new.timed[0] else 1.0
    return tuple(share * one for one in new.timed) if 0 < share < 1 else new.timed
