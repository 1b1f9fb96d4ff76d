"""What reports take of a router where requests wait: ``python -m benchmarks.router.waiting``.

200 requests of 1 or 64 tenants wait at a router whose 10 to 1,000 workers have all the prompts that
they may have, but for those that decode alone. For two seconds each worker reports, at the router's
pace, that all is as it was but for its blocks: nobody has room, so no plan is of use. Shares of a
core that the router's core takes, by the default rule and by `estimated`, which knows what steps
and READs take; beside it the same reports when nothing waits. What carrying and decoding them takes
is shown by `benchmarks.router.fleet`. Target: a quarter of a core. ``--quick``: up to 100 workers.
"""

import argparse
import statistics
import time
from collections import Counter
from dataclasses import replace
from itertools import count

from benchmarks.index.decision import IDLE, Measured, fleet
from benchmarks.index.ours import groups_of, value
from benchmarks.index.workload import Block
from benchmarks.router.fleet import print_share
from disagg.messages.identity import Incarnation
from disagg.messages.sampling import SamplingParams
from disagg.messages.stats import RouterLoad, WorkerStats
from disagg.messages.submit import Role, Submit
from disagg.routing.actions import NewRequest, ToWorker

PROMPT_TOKENS, BLOCK_TOKENS = 8192, 16
NUM_WAITING = 200
OWN_PACE_MS = 100
"""A worker reports no oftener."""
LASTS_MS, ROUNDS = 2_000, 3


class Crowd:
    """A router at which requests wait for room, and its workers as they report."""

    def __init__(self, policy: str, num_workers: int, num_tenants: int) -> None:
        groups = groups_of({"block_tokens": BLOCK_TOKENS, "groups": "full + window 1024"})
        self.core, self._workers = fleet(num_workers, groups, (), policy)
        self._measured = Measured() if policy == "estimated" else None
        self._tokens: Counter[Incarnation] = Counter()
        self._prompts: Counter[Incarnation] = Counter()
        self._now_ms, self._num_reports, self._waiting = 0, 0, list[str]()
        if self._measured is not None:
            self._report_all()
            self._measured.reads(self.core)
        for number in count():
            if self.core.num_waiting == NUM_WAITING:
                break
            self._ask(f"request-{number}", number, f"tenant-{number % num_tenants}")
        self._report_all()  # some go where there is room by that
        assert self.core.num_waiting

    def share(self) -> float:
        """Of a core, what the reports of two seconds take."""
        pace_ms = max(OWN_PACE_MS, self.core.report_pace.stats_ms)
        num, spent_s = len(self._workers) * LASTS_MS // pace_ms, 0.0
        for number in range(num):
            self._now_ms += LASTS_MS * (number + 1) // num - LASTS_MS * number // num
            worker = self._workers[number % len(self._workers)]
            stats = self._stats(worker)
            before_s = time.process_time()
            self.core.from_worker(self._now_ms, worker, stats)
            spent_s += time.process_time() - before_s
        return spent_s * 1000 / LASTS_MS

    def nothing_waits(self) -> None:
        """All that wait leave."""
        for name in self._waiting:
            self.core.cancel(self._now_ms, name, "left")
        assert not self.core.num_waiting

    def _ask(self, name: str, number: int, tenant: str) -> None:
        hashes = tuple(value(Block(number, i)) for i in range(PROMPT_TOKENS // BLOCK_TOKENS))
        request = NewRequest(
            name,
            tuple(range(PROMPT_TOKENS)),
            hashes,
            b"",
            SamplingParams(50),
            tenant,
            revision=self.core.assign(name),
        )
        for sent in self.core.generate(self._now_ms, request):
            if isinstance(sent, ToWorker) and isinstance(sent.message, Submit):
                prefills = sent.message.role is not Role.DECODE
                self._tokens[sent.worker] += PROMPT_TOKENS * prefills
                self._prompts[sent.worker] += prefills
        self._waiting.append(name)

    def _report_all(self) -> None:
        for worker in self._workers:
            self.core.from_worker(self._now_ms, worker, self._stats(worker))

    def _stats(self, worker: Incarnation) -> WorkerStats:
        self._num_reports += 1
        stats = IDLE if self._measured is None else self._measured.stats()
        tokens, prompts = self._tokens[worker], self._prompts[worker]
        return replace(
            stats,
            num_prefill_tokens_queued=tokens,
            num_prompts_queued=prompts,
            num_blocks_free=IDLE.num_blocks_free - self._num_reports % 7,
            loads=(RouterLoad("", prompts, tokens),),
        )


def main() -> int:
    """Print a line per fleet, rule and number of tenants; 1 if one takes too much."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="up to 100 workers")
    reached = True
    for num_workers in (10, 100) if parser.parse_args().quick else (10, 100, 300, 1_000):
        for policy in ("prefix_then_load", "estimated"):
            for num_tenants in (1, 64):
                crowd = Crowd(policy, num_workers, num_tenants)
                ours = statistics.median(crowd.share() for _ in range(ROUNDS))
                num_waiting = crowd.core.num_waiting
                crowd.nothing_waits()
                peer = statistics.median(crowd.share() for _ in range(ROUNDS))
                name = f"{num_waiting} wait, {num_tenants} tenants, {num_workers} workers, {policy}"
                reached &= print_share(name, ours, peer, "nothing waits")
    return 0 if reached else 1


if __name__ == "__main__":
    raise SystemExit(main())
