"""A reader's own cache grows while its request for a prefix is on its way."""

from dataclasses import replace

from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.shapes.layout import plan_layout
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import AskLease, PeerMessage, WithdrawLease
from disagg.messages.reports import TransferReport
from disagg.messages.sampling import SampledToken, SamplingParams
from disagg.messages.submit import PeerAddress, PullPlan, Role, Submit
from disagg.scheduling.actions import ToRouter, WorkerAction
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.step import StepResult
from disagg.transfer.actions import PostRead, Send
from tests.unit.scheduling.test_preempted_prefill import LIMITS

READER, OWNER = Incarnation("reader", "1"), Incarnation("owner", "1")
PROMPT = tuple(range(50, 90))


class Workers:
    """An owner of the first 24 tokens and a reader that believes there are 32; messages wait."""

    def __init__(self) -> None:
        layout = plan_layout([FullAttentionSpec(4, 1, 8, 4)])
        limits = replace(LIMITS, max_model_tokens=64, max_step_tokens=64, max_waiting=9)
        self.cores: dict[Incarnation, WorkerCore] = {}
        for me in (READER, OWNER):
            kv = KVCacheCoordinator(layout, 64, max_model_tokens=64, max_step_tokens=64)
            self.cores[me] = WorkerCore(me, layout, kv, BlockHasher(b"key", 4), limits, lambda _: 1)
        self.queue: list[tuple[Incarnation, Incarnation, PeerMessage]] = []
        self.said: list[PeerMessage] = []
        self.reports: list[TransferReport] = []
        self.num_blocks_read = 0
        self.serve(OWNER, "cached", PROMPT[:25])

    def serve(self, me: Incarnation, name: str, prompt: tuple[int, ...]) -> None:
        """A request that ends with its first token, and leaves its prompt in the cache."""
        submit = Submit(RequestKey(name, 1), Role.LOCAL, prompt, (), b"", SamplingParams(1))
        self.carry(me, self.cores[me].on_router_message(0, submit))
        self.step(me)

    def step(self, me: Incarnation) -> None:
        step, actions = self.cores[me].next_step(0)
        self.carry(me, actions)
        if step is not None:
            samples = tuple(SampledToken(7) if part.sampling else None for part in step.slices)
            self.carry(me, self.cores[me].on_step_done(0, StepResult(step.step_id, samples)))

    def pull(self) -> None:
        plan = PullPlan(PeerAddress(OWNER, "host:1"), 32)
        key = RequestKey("pulls", 1)
        submit = Submit(key, Role.LOCAL, PROMPT, (), b"", SamplingParams(1), pull=plan)
        self.carry(READER, self.cores[READER].on_router_message(0, submit))
        self.carry(READER, self.cores[READER].next_step(0)[1])

    def carry(self, me: Incarnation, actions: list[WorkerAction]) -> None:
        for action in actions:
            match action:
                case Send(to, message):
                    self.queue.append((me, to, message))
                    self.said.append(message)
                case PostRead():
                    self.num_blocks_read += len(action.dst_blocks)
                    self.carry(me, self.cores[me].on_read_done(0, action.read_id, ""))
                case ToRouter(TransferReport() as report):
                    self.reports.append(report)

    def deliver(self) -> None:
        while self.queue:
            sender, to, message = self.queue.pop(0)
            self.carry(to, self.cores[to].on_peer_message(0, sender, message))


def test_a_shorter_answer_while_the_own_cache_grew_is_read_all_the_same() -> None:
    workers = Workers()
    workers.pull()
    assert [type(message) for message in workers.said] == [AskLease]
    workers.serve(READER, "same prefix", PROMPT[:9])  # two blocks, cached here now
    workers.deliver()
    assert not any(isinstance(message, WithdrawLease) for message in workers.said)
    (report,) = workers.reports
    assert (report.failed, report.num_tokens) == ("", 24)
    assert workers.num_blocks_read == 4, "of six that were offered"
    workers.step(READER)
    for core in workers.cores.values():
        assert not core.sequences
        assert not core.leases.num_live
        assert core.kv.num_free_blocks == core.kv.num_usable_blocks


def test_an_answer_is_read_whole_where_nothing_grew() -> None:
    workers = Workers()
    workers.pull()
    workers.deliver()
    (report,) = workers.reports
    assert (report.failed, report.num_tokens, workers.num_blocks_read) == ("", 24, 6)
