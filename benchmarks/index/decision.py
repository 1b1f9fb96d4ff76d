"""The router's whole decision, from a request to its submits: one case."""

import json
import random
import statistics
import sys
import time
from dataclasses import replace
from itertools import count, cycle

from benchmarks.index.ours import groups_of, told, value
from benchmarks.index.workload import Block, Event, holdings, prompt_blocks
from disagg.kv.hashing import BlockHasher
from disagg.messages.identity import Incarnation
from disagg.messages.kv_events import KVEvent, TierStored
from disagg.messages.registration import Contract, GroupInfo, TierInfo, WorkerInfo
from disagg.messages.reports import GroupTransfer, TransferReport
from disagg.messages.sampling import SamplingParams
from disagg.messages.stats import WorkerStats
from disagg.messages.step_times import StepShape
from disagg.messages.submit import Role, Submit
from disagg.routing.actions import NewRequest, ToWorker
from disagg.routing.core import RouterCore
from disagg.routing.options import RoutingOptions
from disagg.scheduling.step_meter import StepMeter
from disagg.telemetry.garbage_collector import spare_garbage_collector

IDLE = WorkerStats(0, 0, 0, 1 << 20, 1 << 20, 0, 0, 0, 0, ready=True)
FEW = 3
ROLES = ("prefill", "decode", "both")
MEASURED_STEPS = 64


def fleet(
    num_workers: int, groups: list[GroupInfo], tiers: tuple[TierInfo, ...], policy: str
) -> tuple[RouterCore, list[Incarnation]]:
    """A router and its workers, all idle: the hardest case, as load chooses none of them."""
    block_tokens = groups[0].block_tokens
    core = RouterCore(
        RoutingOptions(
            hasher_of=lambda _: BlockHasher(b"benchmark", block_tokens).extend,
            replans_max=3,
            requests_max=1 << 20,
            request_timeout_ms=1000,
            records_max=16,
            worker_silent_ms=1 << 40,
            policy=policy,
        )
    )
    contract = Contract("m", "float32", (), "pages", 1024, block_tokens, "sha256", 1, 1)
    workers = [Incarnation(f"worker-{number}", "1") for number in range(num_workers)]
    for name, role in zip(workers, cycle(ROLES), strict=False):
        info = WorkerInfo(
            name, "a:1", role, "m", contract, tuple(groups), 1 << 20, 1 << 20, 1 << 30, tiers
        )
        core.register(0, info)
        core.session_up(0, name)
        core.from_worker(0, name, IDLE)
    return core, workers


class Measured:
    """Steps and READs of a fleet in which everything takes its time: what `estimated` goes by."""

    def __init__(self) -> None:
        self._meter = StepMeter(512)
        self._num_steps = 0
        for _ in range(MEASURED_STEPS):
            self.stats()

    def stats(self) -> WorkerStats:
        """Of an idle worker that has made one step more since."""
        self._num_steps += 1
        size = self._num_steps % 5
        if self._num_steps % 2:
            shape = StepShape(64 * size, 16.0 * size, 0, 0.0)
        else:
            shape = StepShape(0, 0.0, 1 + size, 2.0 * size)
        self._meter.add(shape, 10 + 0.1 * shape.num_prefill_tokens + shape.num_decodes)
        return replace(IDLE, step_times=self._meter.times)

    def reads(self, core: RouterCore) -> None:
        """Hand-overs of short prompts, until enough is known to do without."""
        for number in count(1):
            name = f"measured-{number}"
            request = NewRequest(
                name, (1, 2, 3), (), b"", SamplingParams(5), "", revision=core.assign(name)
            )
            sent = [one for one in core.generate(0, request) if isinstance(one, ToWorker)]
            who = {one.message.role: one for one in sent if isinstance(one.message, Submit)}
            reader = who.get(Role.DECODE)
            if reader is not None:
                assert isinstance(reader.message, Submit)
                num_bytes, read_ms = number << 20, 3 + number
                group = GroupTransfer(0, "full_attention", 0, 1, "", 1, num_bytes, 0, 1, num_bytes)
                report = TransferReport(
                    reader.message.key, who[Role.PREFILL].worker, (group,), 1, read_ms, read_ms + 1
                )
                core.from_worker(0, reader.worker, report)
            core.cancel(0, name, "measured")
            for one in sent:
                core.from_worker(0, one.worker, self.stats())
            if reader is None:
                return


def in_tier(what: str, event: Event, num_blocks: int, chance: random.Random) -> int:
    """Blocks of the prompt in a worker's tier: ``what`` says how many beside its pool's."""
    length = len(event.blocks)
    return {
        "empty": 0,
        "same": length,
        "alone": length,
        "few": num_blocks if event.worker < FEW else 0,
        "more": chance.randint(length, num_blocks),
        "whole": num_blocks,
    }[what]


def main() -> None:
    """Fill the caches, then let requests in one after the other, each ended before the next."""
    order = json.loads(sys.argv[1])
    groups = groups_of(order)
    block_tokens = order["block_tokens"]
    held_by_tiers = order.get("tiers")
    tiers = (TierInfo("host", 1 << 20),) if held_by_tiers else ()
    policy = order.get("policy", "prefix_then_load")  # the other one is slower
    core, workers = fleet(order["workers"], groups, tiers, policy)
    measured = Measured()
    if policy == "estimated":
        for one in workers:
            core.from_worker(0, one, measured.stats())
        measured.reads(core)
    ends, lacking, chance = order.get("ends", False), order.get("lacking", 0.0), random.Random(1)
    num_blocks = 0
    if order["shape"] != "nothing":
        num_blocks = prompt_blocks(block_tokens)
        for event in holdings(order["shape"], order["workers"], block_tokens):
            worker = workers[event.worker]
            lacks = event.blocks[0].index == 0 and chance.random() < lacking
            stored: list[KVEvent] = [*told(event, groups, ends=ends, lacking=lacks)]
            if tiers and event.blocks[0].index == 0:
                length = in_tier(held_by_tiers, event, num_blocks, chance)
                values = tuple(value(Block(0, i)) for i in range(length))
                if held_by_tiers == "alone":
                    stored = []
                if length:
                    stored += [TierStored(0, number, values) for number in range(len(groups))]
            assert core.kv_events(worker, "1", core.kv_sequence(worker), None, stored)
    token_ids = tuple(range(num_blocks * block_tokens + 100))
    spare_garbage_collector()  # as the router does once it has started
    spent: list[float] = []
    for sample in range(order["samples"] + 1):
        hashes = tuple(value(Block(0, i)) for i in range(num_blocks))
        name = f"request-{sample}"
        request = NewRequest(
            name, token_ids, hashes, b"", SamplingParams(5), "", revision=core.assign(name)
        )
        start = time.process_time_ns()
        actions = core.generate(0, request)
        spent.append((time.process_time_ns() - start) / 1e6)
        submits = [one for one in actions if isinstance(one, ToWorker)]
        assert submits, "a decision that submits nothing"
        if policy == "estimated":
            record = core.record(name)
            assert record is not None
            assert record.generations[0].considered, "nothing was weighed"
        core.cancel(0, name, "measured")
        for sent in submits:  # it is idle again
            stats = measured.stats() if policy == "estimated" else replace(IDLE)
            core.from_worker(0, sent.worker, stats)
    print(json.dumps({"ms": statistics.median(spent[1:]), "first_ms": spent[0]}))


if __name__ == "__main__":
    main()
