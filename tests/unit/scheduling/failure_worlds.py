"""Small scripted worlds for every kind of group, and what a failure in them may cost."""

from collections import Counter
from dataclasses import replace

from disagg.kv.kinds.chunked_local import ChunkedLocalSpec
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.kinds.mla import MLASpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.shapes.layout import KVCacheLayout, plan_layout
from disagg.routing.record import GenerationRecord
from disagg.testing.simulation.config import (
    FaultKind,
    PlannedFault,
    PlannedRequest,
    SimulationConfig,
)
from disagg.testing.simulation.failed_read import FailedRead
from disagg.testing.simulation.simulation import Simulation
from disagg.testing.simulation.symbolic_engine import expected_tokens

FULL = FullAttentionSpec(4, 1, 8, 4)
MLA = MLASpec(4, 1, 16, 4)


def window(tokens: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(4, 1, 8, 4, tokens)


def chunks(tokens: int) -> ChunkedLocalSpec:
    return ChunkedLocalSpec(4, 1, 8, 4, tokens)


def states(num_bytes: int) -> LinearStateSpec:
    return LinearStateSpec(4, num_bytes)


LAYOUTS = {
    "full": plan_layout([FULL]),
    "mla": plan_layout([MLA]),
    "window_full": plan_layout([window(8), window(8), FULL]),
    "windows": plan_layout([window(10), window(10)]),
    "chunks_full": plan_layout([chunks(12), FULL]),
    "chunks": plan_layout([chunks(20)]),
    "states_full": plan_layout([states(400), states(400), FULL]),
    "state": plan_layout([states(400)]),
    # As Llama 4, Qwen3-Next and Jamba, and mixtures nobody has trained yet.
    "many_chunks_full": plan_layout([chunks(12), chunks(12), chunks(12), FULL]),
    "states_window_full": plan_layout([states(300), window(8), FULL]),
    "chunks_window_mla": plan_layout([chunks(10), window(8), MLA]),
}
"""States in `states_full` are four blocks each, in `states_window_full` two."""

NUM_FIRST, NUM_ANSWER, NUM_ADDED = 21, 15, 4


def two_turns(
    layout: KVCacheLayout, num_first: int = NUM_FIRST, blocks_per_read: int = 1
) -> SimulationConfig:
    """A hand-over; then a prefix pull of the answer, and a hand-over of the longer history.

    The first prompt takes two steps, so that its first blocks are read while it is computed; in the
    second turn the prefill worker has the first prompt, the decode worker the answer as well.
    """
    first = tuple((37 * i + 11) % 997 for i in range(num_first))
    answer = tuple(expected_tokens(layout, first, NUM_ANSWER))
    script = (
        PlannedRequest(first, NUM_ANSWER),
        PlannedRequest((*first, *answer, *range(NUM_ADDED)), 4),
    )
    return SimulationConfig(
        layout,
        num_blocks=120,
        output_tokens_max=16,
        pull_tokens_min=1,
        blocks_per_read_max=blocks_per_read,
        script=script,
    )


NUM_SHARED = 20


def three_workers(layout: KVCacheLayout) -> SimulationConfig:
    """A second request goes to a decode worker that has nothing of it.

    The first one's decode worker has all but three tokens of its prompt: another owner.
    """
    config = two_turns(layout, NUM_SHARED)
    first, _ = config.script
    second = PlannedRequest((*first.prompt, 7, 8, 9), 4)
    return replace(config, roles=("prefill", "decode", "decode"), script=(first, second))


def play(config: SimulationConfig, seed: int = 1) -> Simulation:
    """One run, which checks tokens and invariants by itself; everything is given back."""
    world = Simulation(config, seed)
    world.run()
    for worker in world.workers.values():
        if worker.alive:
            worker.core.kv.check()
            assert worker.at_rest()
            assert not worker.core.leases.num_live
            assert not worker.core.inbound.statuses()
    return world


def outcomes(world: Simulation) -> list[str]:
    return [world.clients[name].outcome for name in sorted(world.clients)]


def generations(world: Simulation) -> list[GenerationRecord]:
    records = [world.router.record(name) for name in world.clients]
    return [one for record in records if record is not None for one in record.generations]


def causes(world: Simulation) -> Counter[str]:
    """Why plans were given up, by the requests' records."""
    return Counter(one.cause.partition(":")[0] for one in generations(world) if one.cause)


def first_causes(world: Simulation) -> set[str]:
    """The same where one worker says what the other one told it: ``peer_ended: peer_lost``."""
    told = (one.cause.removeprefix("peer_ended: ") for one in generations(world) if one.cause)
    return {cause.partition(":")[0] for cause in told}


def pull_causes(world: Simulation) -> Counter[str]:
    """Why prefix pulls were given up, by the requests' records."""
    pulls = [one.pull.failed for one in generations(world) if one.pull is not None]
    return Counter(failed.partition(":")[0] for failed in pulls if failed)


def counted(world: Simulation, name: str) -> Counter[str]:
    """A counter of the router's, by label."""
    found = {label: n for (one, label), n in world.router.counters.items() if one == name}
    return Counter(found)


def counted_by_workers(world: Simulation, name: str) -> int:
    """A counter over all workers that live."""
    return sum(worker.core.counters.counts.get(name, 0) for worker in world.workers.values())


def longest_intact(layout: KVCacheLayout, lost: FailedRead, num_tokens: int) -> int:
    """The longest prefix that all groups have after a failed READ, from the specs alone.

    One token at least of ``num_tokens`` is always computed.
    """
    alignment = max(group.spec.block_tokens for group in layout.groups)
    for length in range(num_tokens - num_tokens % alignment, 0, -alignment):
        if length < num_tokens and all(
            needed(group.spec, length) <= intact(layout, lost, group.group)
            for group in layout.groups
        ):
            return length
    return 0


def needed(spec: Spec, length: int) -> frozenset[int]:
    """Blocks that the token at ``length`` sees; a state is named by the block that it ends."""
    size = spec.block_tokens
    match spec:
        case SlidingWindowSpec():
            first = max(0, length - spec.window_tokens + 1)
        case ChunkedLocalSpec():
            first = length // spec.chunk_tokens * spec.chunk_tokens
        case LinearStateSpec():
            first = length - size
        case _:
            first = 0
    return frozenset(range(first // size, length // size)) if first < length else frozenset()


def intact(layout: KVCacheLayout, lost: FailedRead, group: int) -> frozenset[int]:
    """Full blocks, or states at block ends, that the reader has after a failed READ."""
    spec, size = layout.groups[group].spec, layout.groups[group].blocks_per_state
    failed = {position for one, position in lost.failed if one == group}
    arrived = lost.pulled[group] - failed
    if isinstance(spec, LinearStateSpec):
        if failed or lost.num_tokens % spec.block_tokens:
            arrived = frozenset()
        arrived = frozenset(position // size for position in arrived)
    whole = lost.num_tokens // spec.block_tokens
    return lost.cached[group] | {position for position in arrived if position < whole}


Fault = tuple[FaultKind, str, str]
"""What befalls whom, and the other end of a link."""
PAIR_FAULTS: list[Fault] = [
    (FaultKind.KILL, "w0", ""),
    (FaultKind.KILL, "w1", ""),
    (FaultKind.CUT, "w0", "w1"),
    (FaultKind.EXPIRE, "w0", ""),
    (FaultKind.EXPIRE, "w1", ""),
    (FaultKind.PREEMPT, "w0", ""),
    (FaultKind.PREEMPT, "w1", ""),
    (FaultKind.CANCEL, "", ""),
]
"""In `two_turns` w0 prefills and w1 decodes: each is owner and reader in turn."""
TRIO_FAULTS: list[Fault] = [
    *(one for one in PAIR_FAULTS if one != (FaultKind.EXPIRE, "w1", "")),
    (FaultKind.KILL, "w2", ""),
    (FaultKind.CUT, "w0", "w2"),
    (FaultKind.PREEMPT, "w2", ""),
]


def with_fault(config: SimulationConfig, event: int, fault: Fault) -> SimulationConfig:
    kind, worker, other = fault
    return replace(config, faults=(PlannedFault(event, kind, worker, other),))
