"""Bounds are on standing still: what goes on is handed over, however long it takes."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.shapes.layout import KVCacheLayout, plan_layout
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import Offers, PeerMessage, ReadProgress
from disagg.messages.reports import TransferReport
from disagg.messages.sampling import SampledToken, SamplingParams
from disagg.messages.session import EndReason, PartEnded, PrefillProgress
from disagg.messages.submit import PeerAddress, Role, Submit
from disagg.scheduling.actions import ToRouter, WorkerAction
from disagg.scheduling.admission import handover_tokens_max
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.step import StepResult
from disagg.transfer.actions import PostRead, Send
from tests.unit.scheduling.test_preempted_prefill import LIMITS

P, D = Incarnation("p", "1"), Incarnation("d", "1")
FULL, WINDOW = FullAttentionSpec(4, 1, 8, 4), SlidingWindowSpec(4, 1, 8, 4, 8)
LAYOUTS = {
    "full": plan_layout([FULL]),
    "windows": plan_layout([WINDOW, WINDOW]),
    "both": plan_layout([WINDOW, FULL]),
}
MINUTE, HOUR = 60_000, 3_600_000
KEY = RequestKey("long", 1)
DEFAULTS = replace(
    LIMITS,
    max_sequences=4,
    handover_share_max=0.5,
    reserve_timeout_ms=2_000,
    reservation_ttl_ms=2 * MINUTE,
    lease_ttl_ms=MINUTE,
    commit_repeat_ms=200,
    read_stuck_ms=10_000,
)


class Pair:
    """A prefill and a decode worker; messages arrive at once, steps and READs take time."""

    def __init__(
        self,
        layout: KVCacheLayout,
        num_tokens: int,
        *,
        num_blocks: int = 1_000,
        chunk: int = 16,
        **limits: Any,
    ) -> None:
        self.now_ms = 0
        self.tokens = tuple(range(num_tokens))
        bounds = replace(DEFAULTS, max_model_tokens=num_tokens + 8, max_step_tokens=chunk, **limits)
        self.cores: dict[Incarnation, WorkerCore] = {}
        for me in (P, D):
            kv = KVCacheCoordinator(
                layout,
                num_blocks,
                max_model_tokens=bounds.max_model_tokens,
                max_step_tokens=chunk,
            )
            size = layout.hash_block_tokens
            self.cores[me] = WorkerCore(
                me, layout, kv, BlockHasher(b"key", size), bounds, lambda _: 1
            )
        self.reads: list[PostRead] = []
        self.ends: list[PartEnded] = []
        self.progress: list[tuple[int, int]] = []
        """What the prefill worker showed the router, and when."""
        self.reading: list[tuple[int, int]] = []
        """What the decode worker did."""
        self.committed: list[TransferReport] = []
        self.messages: list[PeerMessage] = []

    def submit(self, key: RequestKey = KEY, tokens: tuple[int, ...] | None = None) -> None:
        for me, role, peer in ((D, Role.DECODE, P), (P, Role.PREFILL, D)):
            address = PeerAddress(peer, "host:1")
            prompt = self.tokens if tokens is None else tokens
            submit = Submit(key, role, prompt, (), b"", SamplingParams(2), address)
            self.carry(me, self.cores[me].on_router_message(self.now_ms, submit))

    def carry(self, me: Incarnation, actions: list[WorkerAction]) -> None:
        for action in actions:
            match action:
                case Send(to, message):
                    self.messages.append(message)
                    core = self.cores[to]
                    self.carry(to, core.on_peer_message(self.now_ms, me, message))
                case PostRead():
                    self.reads.append(action)
                case ToRouter(PartEnded() as ended):
                    self.ends.append(ended)
                case ToRouter(PrefillProgress(_, num_computed)):
                    shown = self.progress if me == P else self.reading
                    shown.append((self.now_ms, num_computed))
                case ToRouter(TransferReport() as report):
                    self.committed.append(report)

    def wait(self, duration_ms: int) -> None:
        """Time goes by in ticks of a second."""
        until_ms = self.now_ms + duration_ms
        while self.now_ms < until_ms:
            self.now_ms = min(self.now_ms + 1_000, until_ms)
            for me, core in self.cores.items():
                self.carry(me, core.tick(self.now_ms))

    def land(self, reads: list[PostRead]) -> None:
        for read in reads:
            self.carry(D, self.cores[D].on_read_done(self.now_ms, read.read_id, ""))

    def steps(self, step_ms: int) -> Iterator[int]:
        """Each step of the prefill; READs posted meanwhile end with it."""
        core = self.cores[P]
        while True:
            step, actions = core.next_step(self.now_ms)
            self.carry(P, actions)
            step, more = (step, []) if step else core.next_step(self.now_ms)
            self.carry(P, more)
            if step is None:
                return
            reads, self.reads = self.reads, []
            self.land(reads)
            self.wait(step_ms)
            samples = tuple(SampledToken(7) if part.sampling else None for part in step.slices)
            self.carry(P, core.on_step_done(self.now_ms, StepResult(step.step_id, samples)))
            yield step.step_id

    def prefill(self, step_ms: int) -> int:
        """The whole prompt; how long it took."""
        began_ms = self.now_ms
        for _ in self.steps(step_ms):
            pass
        return self.now_ms - began_ms


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prefill_of_an_hour_is_handed_over(layout: str) -> None:
    pair = Pair(LAYOUTS[layout], 16 * 120)
    pair.submit()
    assert pair.prefill(30_000) >= HOUR
    pair.land(pair.reads)
    assert pair.ends == []
    (report,) = pair.committed
    assert report.num_tokens == 16 * 120


@pytest.mark.parametrize("layout", LAYOUTS)
def test_also_where_the_reader_has_most_of_it(layout: str) -> None:
    pair = Pair(LAYOUTS[layout], 16 * 120)
    decode = pair.cores[D]
    # The decode worker has served the same prompt; the prefill worker has nothing of it.
    address = RequestKey("before", 1)
    submit = Submit(address, Role.LOCAL, pair.tokens, (), b"", SamplingParams(1))
    decode.on_router_message(0, submit)
    while (step := decode.next_step(0)[0]) is not None:
        samples = tuple(SampledToken(7) if part.sampling else None for part in step.slices)
        decode.on_step_done(0, StepResult(step.step_id, samples))
    pair.submit()
    pair.prefill(30_000)
    pair.land(pair.reads)
    assert pair.ends == []
    assert len(pair.committed) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_router_and_the_reader_are_shown_that_it_goes_on_but_not_too_often(layout: str) -> None:
    pair = Pair(LAYOUTS[layout], 16 * 50)
    pair.submit()
    pair.prefill(200)
    times = [now_ms for now_ms, _ in pair.progress]
    assert len(times) >= 8
    assert all(later - now >= 1_000 for now, later in pairwise(times))
    figures = [num_computed for _, num_computed in pair.progress]
    assert figures == sorted(set(figures))
    shown = {m.num_computed_tokens for m in pair.messages if isinstance(m, Offers)} - {0}
    assert shown == (set(figures) if layout == "windows" else set()), "others see new blocks"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prefill_that_stands_still_is_not(layout: str) -> None:
    pair = Pair(LAYOUTS[layout], 16 * 20)
    pair.submit()
    steps = pair.steps(30_000)
    for _ in range(5):
        next(steps)
    pair.land(pair.reads)
    core = pair.cores[P]
    core.next_step(pair.now_ms)  # never ends
    pair.wait(MINUTE - 1)
    assert pair.ends == []
    pair.wait(2_000)
    assert {end.reason for end in pair.ends} <= {EndReason.LEASE_DEAD, EndReason.PEER_ENDED}
    assert pair.ends
    assert not pair.cores[D].decode_side.pulls


def test_a_reservation_that_nothing_comes_of_names_its_cause() -> None:
    pair = Pair(LAYOUTS["full"], 16 * 20, lease_ttl_ms=10 * HOUR)
    pair.submit()
    next(pair.steps(1_000))
    pair.land(pair.reads)
    pair.cores[P].next_step(pair.now_ms)
    pair.wait(2 * MINUTE + 1_000)
    messages = {end.reason: end.message for end in pair.ends}
    assert messages[EndReason.EXPIRED] == "nothing was offered or read for too long"


def test_slow_reads_renew_the_lease_of_a_prompt_that_is_complete() -> None:
    pair = Pair(LAYOUTS["full"], 16 * 20, blocks_per_read_max=8, read_stuck_ms=HOUR)
    pair.submit()
    core = pair.cores[P]
    for _ in pair.steps(10):
        pair.reads, held = [], pair.reads
        pair.reads = held
    while pair.reads:
        pair.wait(50_000)
        read = pair.reads.pop(0)
        pair.land([read])
    assert pair.ends == []
    assert len(pair.committed) == 1
    assert any(isinstance(message, ReadProgress) for message in pair.messages)
    assert not core.leases.num_live


def test_the_router_is_shown_what_is_read_but_not_too_often() -> None:
    pair = Pair(LAYOUTS["full"], 320, chunk=320, blocks_per_read_max=8, read_stuck_ms=HOUR)
    pair.submit()
    pair.prefill(10)
    for wait_ms in (0, 50_000, 50_000, 100, 100, 900, 50_000, 50_000, 50_000, 50_000):
        pair.wait(wait_ms)
        pair.land([pair.reads.pop(0)])
    assert len(pair.committed) == 1
    assert pair.reading == [
        (50_010, 64),
        (100_010, 96),
        (101_110, 192),
        (151_110, 224),
        (201_110, 256),
        (251_110, 288),
        (301_110, 320),
    ]


def test_reads_that_stand_still_do_not() -> None:
    pair = Pair(LAYOUTS["full"], 16 * 20, read_stuck_ms=HOUR)
    pair.submit()
    pair.prefill(10)
    assert pair.reads
    pair.wait(MINUTE + 2_000)
    assert {end.reason for end in pair.ends} == {EndReason.LEASE_DEAD}


def test_the_same_figure_again_renews_nothing() -> None:
    pair = Pair(LAYOUTS["windows"], 16 * 20)
    pair.submit()
    steps = pair.steps(30_000)
    next(steps)
    next(steps)
    prefill, decode = pair.cores[P], pair.cores[D]
    (lease,) = prefill.leases._live.values()
    before = lease.expires_ms
    pair.now_ms += 1_000
    prefill.leases.renew(pair.now_ms, lease.lease_id, lease.num_computed)
    prefill.leases.on_read_progress(pair.now_ms, D, ReadProgress(KEY, lease.lease_id, 0))
    assert lease.expires_ms == before
    reserved = decode.decode_side._reservations._entries[KEY].expires_ms
    decode.on_peer_message(pair.now_ms, P, lease.offers(len(lease.ranges)))
    assert decode.decode_side._reservations._entries[KEY].expires_ms == reserved


GEMMA = plan_layout([SlidingWindowSpec(16, 1, 8, 4, 1_024)] * 5 + [FullAttentionSpec(16, 1, 8, 4)])


def test_a_prompt_that_windows_make_cheap_is_handed_over_by_default() -> None:
    """70,006 tokens in a pool of 5,400 blocks; full tables would need five times as many."""
    pair = Pair(GEMMA, 70_006, num_blocks=5_400, chunk=2_048)
    assert handover_tokens_max(pair.cores[P].limits, pair.cores[P].kv) >= 70_006
    pair.submit()
    assert pair.prefill(8_000) > 2 * MINUTE
    pair.land(pair.reads)
    assert pair.ends == []
    (report,) = pair.committed
    assert report.num_tokens == 70_006


def test_two_of_them_at_once_are_not() -> None:
    pair = Pair(LAYOUTS["full"], 700, num_blocks=300)
    core = pair.cores[P]
    pair.submit()
    pair.submit(RequestKey("other", 1), tuple(range(1_000, 1_700)))
    core.next_step(0)
    assert core.budget.blocks_max < core.budget.num_blocks < core.kv.num_usable_blocks
    assert not core.budget.exceeded
    assert len(core.prefill_side.backing_off) + len(core.batcher.waiting) == 1
