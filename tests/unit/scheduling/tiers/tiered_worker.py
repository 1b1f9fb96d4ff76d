"""One worker core over symbolic memory, and tiers that copy when they are told to."""

from collections.abc import Callable
from itertools import count

from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.shapes.layout import KVCacheLayout
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.outputs import SequenceOutput, StepOutputs
from disagg.messages.reports import PrefillReport
from disagg.messages.sampling import SamplingParams
from disagg.messages.session import PartEnded, ToRouterMessage
from disagg.messages.submit import Role, Submit
from disagg.scheduling.actions import (
    ClearTier,
    ReadTier,
    TierKey,
    ToRouter,
    WorkerAction,
    WriteTier,
)
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.limits import WorkerLimits
from disagg.scheduling.stats import check_core
from disagg.scheduling.step import Step
from disagg.scheduling.tiers.index import TierSetting, WritePolicy
from disagg.testing.simulation.symbolic_engine import Cell, SymbolicEngine, SymbolicMemory
from disagg.transfer.actions import Send

SLOW_MS = 500
ALWAYS: Callable[[TierKey], bool] = lambda key: True  # noqa: E731


def tier(
    name: str = "host", write: WritePolicy = "publish", blocks_max: int = 100_000
) -> TierSetting:
    return TierSetting(name, write, blocks_max, SLOW_MS)


class TieredWorker:
    """Runs steps at once; carries copies out at once, or keeps them in ``copies`` until told."""

    num_logprobs: int | None = None
    """Asked for with every prompt."""

    def __init__(
        self,
        layout: KVCacheLayout,
        num_blocks: int,
        *tiers: TierSetting,
        max_step_tokens: int = 16,
        max_model_tokens: int = 200,
        handover_share_max: float = 1.0,
        at_once: bool = True,
        write_share_max: float = 1.0,
        max_sequences: int = 4,
        blocks_per_copy_max: int = 64,
    ) -> None:
        limits = WorkerLimits(
            max_model_tokens=max_model_tokens,
            max_step_tokens=max_step_tokens,
            max_sequences=max_sequences,
            max_waiting=9,
            handover_share_max=handover_share_max,
            reserve_timeout_ms=100,
            reserve_passes_max=3,
            reservation_ttl_ms=5_000,
            lease_ttl_ms=5_000,
            committed_max=2,
            commit_repeat_ms=50,
            read_stuck_ms=1_000,
            blocks_per_read_max=64,
            quarantine_share_max=1.0,
            tier_write_share_max=write_share_max,
            blocks_per_tier_copy_max=blocks_per_copy_max,
        )
        self.kv = KVCacheCoordinator(
            layout,
            num_blocks,
            max_model_tokens=max_model_tokens,
            max_step_tokens=max_step_tokens,
        )
        hasher = BlockHasher(b"tiers", layout.hash_block_tokens)
        me = Incarnation("w", "e")
        self.core = WorkerCore(me, layout, self.kv, hasher, limits, lambda _: 1, tiers)
        self.memory = SymbolicMemory(num_blocks)
        self.engine = SymbolicEngine(layout, self.memory)
        self.stores: dict[str, dict[TierKey, dict[int, Cell]]] = {one.name: {} for one in tiers}
        self.takes = ALWAYS
        self.now_ms = 0
        self.copies: list[WriteTier | ReadTier] = []
        self.clears: list[str] = []
        self.sent: list[Send] = []
        self.said: list[ToRouterMessage] = []
        self._at_once = at_once
        self._numbers = count()

    @property
    def counts(self) -> dict[str, int]:
        return self.core.counters.counts

    def submit(self, prompt: tuple[int, ...], num_tokens: int = 1) -> RequestKey:
        key = RequestKey(f"r{next(self._numbers)}", 1)
        sampling = SamplingParams(max_tokens=num_tokens, num_logprobs=self.num_logprobs)
        self.perform(
            self.core.on_router_message(
                self.now_ms, Submit(key, Role.LOCAL, prompt, (), b"", sampling)
            )
        )
        return key

    def ask(self, prompt: tuple[int, ...], num_tokens: int = 1) -> list[int]:
        """Serve a prompt to its end, alone; returns the answer."""
        key = self.submit(prompt, num_tokens)
        self.run()
        assert key not in self.core.sequences, self.core.sequences[key].phase
        return self.answer(key)

    def answer(self, key: RequestKey) -> list[int]:
        return [token for one in self.outputs(key) for token in one.token_ids]

    def outputs(self, key: RequestKey) -> list[SequenceOutput]:
        steps = (said for said in self.said if isinstance(said, StepOutputs))
        return [one for step in steps for one in step.outputs if one.key == key]

    def report(self, key: RequestKey) -> PrefillReport:
        (found,) = (report for report in self.reports() if report.key == key)
        return found

    def reports(self) -> list[PrefillReport]:
        return [said for said in self.said if isinstance(said, PrefillReport)]

    def run(self) -> None:
        """Steps until there is none."""
        while (step := self.step()) is not None:
            self.end(step)

    def step(self) -> Step | None:
        """Plan a step; again, where what was carried out meanwhile lets somebody start."""
        for _ in range(4):
            step, actions = self.core.next_step(self.now_ms)
            self.perform(actions)
            if step is not None:
                return step
        return None

    def end(self, step: Step) -> None:
        """Run a step and report it."""
        self.perform(self.core.on_step_done(self.now_ms, self.engine.run(step)))
        check_core(self.core)

    def tick(self, ms: int = 10) -> None:
        self.now_ms += ms
        self.perform(self.core.tick(self.now_ms))

    def perform(self, actions: list[WorkerAction]) -> None:
        for action in actions:
            match action:
                case ToRouter(message):
                    assert not isinstance(message, PartEnded), message
                    self.said.append(message)
                case WriteTier() | ReadTier():
                    self.copies.append(action)
                case Send():
                    self.sent.append(action)
                case ClearTier(name):
                    self.clears.append(name)
        while self._at_once and (self.copies or self.clears):
            if self.copies:
                self.copy(self.copies[0])
            else:
                self.clear(self.clears[0])

    def clear(self, name: str, error: str = "") -> None:
        """Empty a tier and report it; with an error nothing of it goes."""
        self.clears.remove(name)
        assert not any(copy.tier == name for copy in self.copies), "a copy is under way"
        if not error:
            self.stores[name].clear()
        self.perform(self.core.on_tier_cleared(self.now_ms, name, error))
        check_core(self.core)

    def copy(self, action: WriteTier | ReadTier) -> None:
        """Carry a copy out and report it."""
        self.copies.remove(action)
        store = self.stores[action.tier]
        if isinstance(action, WriteTier):
            taken = [pair for pair in action.blocks if self.takes(pair[0])]
            store |= {key: dict(self.memory.blocks[block]) for key, block in taken}
            stored = tuple(key for key, _ in taken)
            done = self.core.on_tier_written(self.now_ms, action.copy_id, stored, ())
        else:
            for key, block in action.blocks:
                self.memory.blocks[block] = dict(store.get(key, {}))
            intact = tuple(key in store for key, _ in action.blocks)
            done = self.core.on_tier_read(self.now_ms, action.copy_id, intact)
        check_core(self.core)
        self.perform(done)
