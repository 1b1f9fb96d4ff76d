"""Random lives of sequences against a brute-force memory, with everything interleaved."""

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from disagg.kv.blocks.cache_policy import EVICTIONS
from disagg.kv.blocks.retention import Retention
from disagg.kv.kinds.chunked_local import ChunkedLocalSpec
from disagg.kv.kinds.cross_attention import CrossAttentionSpec
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.kinds.mla import MLASpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.sequence import KVSequence
from tests.unit.kv.broken_coordinators import PATCHES
from tests.unit.kv.machine_world import (
    STEPS_MAX,
    Live,
    Run,
    World,
    longest_hit,
    needed_blocks,
    settings_of,
)

sizes = st.sampled_from([4, 8])
full = st.builds(FullAttentionSpec, sizes, st.integers(1, 2), st.just(4), st.just(2))
window = st.builds(SlidingWindowSpec, sizes, st.just(1), st.just(4), st.just(2), st.integers(1, 24))
chunked = st.builds(
    ChunkedLocalSpec, sizes, st.just(1), st.just(4), st.just(2), st.sampled_from([4, 6, 8, 16])
)
state = st.builds(LinearStateSpec, sizes, st.just(64))
latent = st.builds(MLASpec, sizes, st.just(1), st.just(4), st.just(2))
cross = st.builds(CrossAttentionSpec, sizes, st.just(1), st.just(4), st.just(2), st.integers(1, 12))
"""Rare kinds last: shrinking goes towards full attention."""


streams, shares, lengths = st.integers(1, 2), st.integers(0, 60), st.integers(1, 60)


class Machine(RuleBasedStateMachine):
    """Sequences come, compute, decode, are pulled, leased and aborted; steps may overlap."""

    coordinator_patch: Callable[[Any], None] | None = None

    @initialize(
        specs=st.lists(st.one_of(full, window, chunked, state, latent), min_size=1, max_size=4),
        encoder=st.one_of(st.none(), st.none(), st.none(), cross),
        num_blocks=st.integers(8, 60),
        chunk_tokens=st.sampled_from([5, 8, 16]),
        deduplicate=st.booleans(),
        interval_tokens=st.sampled_from([None, None, 0, 12]),
    )
    def start(
        self,
        specs: list[Spec],
        encoder: CrossAttentionSpec | None,
        num_blocks: int,
        chunk_tokens: int,
        deduplicate: bool,
        interval_tokens: int | None,
    ) -> None:
        policy = Retention(interval_tokens)
        if encoder is not None:
            specs = [*specs, encoder]
        order = sorted(EVICTIONS)[num_blocks % len(EVICTIONS)]
        self.world = World(specs, num_blocks, chunk_tokens, deduplicate, policy, order)
        self.kv = self.world.kv
        if self.coordinator_patch is not None:
            self.coordinator_patch(self.kv)
        self.live: dict[int, Live] = {}
        self.steps: list[tuple[int, list[Run]]] = []
        self.inbound: dict[int, tuple[int, KVSequence, Any]] = {}
        self.leases: dict[int, list[tuple[int, dict[int, Any]]]] = {}
        self.count = 0

    # -- sequences ----------------------------------------------------------------------------

    def new_request(self, stream: int, shared: int, length: int) -> KVSequence:
        self.count += 1
        tokens = [
            stream * 1000 + j if j < shared else self.count * 10_000 + j for j in range(length)
        ]
        made = KVSequence(self.count, tokens)
        self.world.hasher.extend(made.hashes, made.token_ids)
        return made

    @precondition(lambda self: len(self.live) < 6 and len(self.steps) < STEPS_MAX)
    @rule(stream=streams, shared=shares, length=lengths, admit=st.booleans())
    def add(self, stream: int, shared: int, length: int, admit: bool) -> None:
        """A prompt to be computed here, its hit adopted at its first step."""
        request = self.new_request(stream, shared, length)
        hit = self.kv.find_longest_cache_hit(request, length - 1)
        assert hit.num_tokens == longest_hit(self.kv, request, length - 1)
        free = self.kv.num_free_blocks
        live = Live(request, length)
        if admit:
            before = self.kv.num_available_blocks
            live.promised = self.kv.admit(request.key, length, hit)
            if not live.promised:
                assert self.kv.num_available_blocks == before
                return
        new = min(self.world.chunk_tokens, length - hit.num_tokens)
        done = self.kv.allocate(request, num_new_tokens=new, hit=None if admit else hit)
        if not done:
            assert not live.promised or self.overdrawn_now()
            if live.promised:
                self.kv.unpromise(request.key)
            assert self.kv.num_free_blocks == free
            return
        self.live[self.count] = live
        live.done = live.launched = live.next_query = hit.num_tokens
        self.launch([(live, new)])

    @precondition(lambda self: len(self.live) < 6)
    @rule(stream=streams, shared=shares, length=lengths, new=st.integers(0, 1))
    def reserve(self, stream: int, shared: int, length: int, new: int) -> None:
        """A prompt that is computed elsewhere: what is lacked is pulled."""
        request = self.new_request(stream, shared, length)
        free = self.kv.num_free_blocks
        reserved = self.kv.reserve_external(request, length, new)
        if reserved is None:
            assert self.kv.num_free_blocks == free
            return
        for group, spec in enumerate(self.world.specs):
            first = reserved.hit_tokens[group] // spec.block_tokens
            assert not first or isinstance(spec, FullAttentionSpec | MLASpec)
            wanted = [place for place in needed_blocks(spec, length) if place >= first]
            assert [place for place, _ in reserved.lacks[group]] == wanted
        blocks = [block for group in reserved.lacks for _, block in group]
        self.kv.pool.hold(("inbound", self.count), blocks)
        self.inbound[self.count] = (self.count, request, reserved)
        self.live[self.count] = Live(request, length, 0, length, external=length)

    @precondition(lambda self: self.inbound)
    @rule(data=st.data(), good=st.booleans())
    def pulled(self, data: st.DataObject, good: bool) -> None:
        """The handles of one transfer are terminal; the owner confirms or refuses."""
        number = data.draw(st.sampled_from(sorted(self.inbound)))
        key, request, reserved = self.inbound.pop(number)
        for group, spec in enumerate(self.world.specs):
            for place, block in reserved.lacks[group]:
                start = place * spec.block_tokens
                end = min(start + spec.block_tokens, reserved.num_external_tokens)
                if isinstance(spec, CrossAttentionSpec):
                    end = min(start + spec.block_tokens, spec.encoder_tokens)
                if isinstance(spec, LinearStateSpec):
                    start = end - 1
                for position in range(start, end):
                    self.world.write(group, block, request.token_ids, position)
        live = self.live.get(key)
        if live is not None:
            if good:
                self.kv.commit_external(key)
                live.done = live.next_query = live.launched
                live.external = None
            else:
                self.end(key)
        self.kv.pool.drop(("inbound", number))

    # -- steps --------------------------------------------------------------------------------

    def launch(self, parts: list[tuple[Live, int]]) -> None:
        runs = []
        for live, new in parts:
            tables = tuple(list(table) for table in self.kv.tables.blocks(live.request.key))
            start, live.launched = live.launched, live.launched + new
            tokens = tuple(live.request.token_ids)
            assert isinstance(live.request.key, int)
            runs.append(Run(live.request.key, tokens, start, live.launched, tables))
        self.count += 1
        self.kv.hold_step(self.count, [run.key for run in runs])
        self.steps.append((self.count, runs))

    @precondition(lambda self: self.live and len(self.steps) < STEPS_MAX)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Launch a step over some sequences, maybe while earlier ones are in flight."""
        ready = [key for key, live in self.live.items() if live.external is None]
        if not ready:
            return
        parts = []
        for key in data.draw(st.lists(st.sampled_from(ready), unique=True, min_size=1)):
            live = self.live[key]
            request = live.request
            if live.launched == request.num_tokens:
                if live.done < live.launched:
                    continue
                request.token_ids.append(key * 10_000 + 5000 + request.num_tokens)
                self.world.hasher.extend(request.hashes, request.token_ids)
            left = request.num_tokens - live.launched
            new = min(left, data.draw(st.integers(1, self.world.chunk_tokens)))
            within = live.promised and live.launched + new <= live.prompt_tokens
            idle = live.done == live.launched
            overdrawn = self.overdrawn_now()
            if idle:
                live.next_query = live.launched  # given up even if the rest fails
            if self.kv.allocate(request, num_new_tokens=new):
                parts.append((live, new))
            else:
                assert not within or overdrawn, "an admitted prompt had to wait"
        if parts:
            self.launch(parts)

    @precondition(lambda self: self.steps)
    @rule(fails=st.integers(0, 7))
    def complete(self, fails: int) -> None:
        """The oldest step ends; one in eight fails, and its sequences with it."""
        number, runs = self.steps.pop(0)
        if fails:
            for run in runs:
                self.world.execute(run, run.key in self.live)
        else:
            for run in runs:
                self.end(run.key)
        self.kv.release_step(number)
        for run in runs:
            live = self.live.get(run.key)
            if live is not None:
                live.done = run.end
                live.next_query = max(live.next_query, run.end)
                self.kv.publish(run.key, run.end)
                self.kv.release_out_of_window(run.key, run.end)

    @precondition(lambda self: self.world.drafts and self.live and not self.steps)
    @rule(data=st.data())
    def draft(self, data: st.DataObject) -> None:
        """A step of one sequence with drafts in all slots that it has; some of them are right."""
        key = data.draw(st.sampled_from(sorted(self.live)))
        live, request = self.live[key], self.live[key].request
        if live.external is not None or live.launched < request.num_tokens:
            return
        first = key * 10_000 + 5000
        request.token_ids.append(first + request.num_tokens)
        self.world.hasher.extend(request.hashes, request.token_ids)
        live.next_query = live.launched
        if not self.kv.allocate(request, num_new_tokens=1):
            return
        num_drafts = self.kv.slots.num_for_drafts(key)
        num_right = data.draw(st.integers(0, num_drafts))
        right = [first + at for at in range(request.num_tokens, request.num_tokens + num_right)]
        self.launch([(live, 1)])
        ((number, (run,)),) = self.steps
        run.tokens = (*run.tokens, *right, *[-1] * (num_drafts - num_right))
        run.end += num_drafts
        self.steps.clear()
        self.world.execute(run, alive=True)
        self.kv.release_step(number)
        self.kv.slots.accept_drafts(key, num_right)
        request.token_ids += right
        self.world.hasher.extend(request.hashes, request.token_ids)
        live.launched += num_right
        live.done = live.next_query = live.launched
        self.kv.publish(key, live.done)
        self.kv.release_out_of_window(key, live.done)

    # -- ends and leases ----------------------------------------------------------------------

    def end(self, key: int) -> None:
        self.live.pop(key, None)
        self.kv.free(key)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """The client goes away, whatever is under way."""
        self.end(data.draw(st.sampled_from(sorted(self.live))))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), ends=st.booleans())
    def lease(self, data: st.DataObject, ends: bool) -> None:
        """Offer the finished full blocks of a sequence; its own holds may end with that."""
        key = data.draw(st.sampled_from(sorted(self.live)))
        live = self.live[key]
        if live.external is not None:
            return
        blocks = [
            (block, dict(self.world.memory[block]))
            for spec, pairs in zip(
                self.world.specs, self.kv.tables.in_window_blocks(key, live.done), strict=True
            )
            for place, block in pairs
            if (place + 1) * spec.block_tokens <= live.done
            and not isinstance(spec, LinearStateSpec)
        ]
        if not blocks:
            return
        self.count += 1
        self.kv.pool.hold(("lease", self.count), [block for block, _ in blocks])
        self.leases[self.count] = blocks
        if ends:
            self.end(key)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def lease_ends(self, data: st.DataObject) -> None:
        """The reader got what was offered, and gives it back."""
        number = data.draw(st.sampled_from(sorted(self.leases)))
        for block, content in self.leases.pop(number):
            assert self.world.memory[block] == content, f"leased block {block} has changed"
        self.kv.pool.drop(("lease", number))

    # -- always -------------------------------------------------------------------------------

    def overdrawn_now(self) -> bool:
        return self.kv.num_free_blocks < self.kv._promises.num_promised

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check()
        if not self.leases and not self.inbound:
            assert not self.overdrawn_now(), "a promise is not backed by free blocks"
        for live in self.live.values():
            if live.external is None:
                key = live.request.key
                steps = [runs for _, runs in self.steps if any(run.key == key for run in runs)]
                self.world.check_table(live, len(steps))
        for group, spec in enumerate(self.world.specs):
            for block in self.kv.pool.cache.index(group).values():
                assert block in self.world.memory, f"block {block} of {spec} published unwritten"

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        while self.steps:
            self.complete(1)
        for key in list(self.live):
            self.end(key)
        for holder in list(self.kv.pool.holders()):
            self.kv.pool.drop(holder)
        self.kv.check()
        assert self.kv.num_free_blocks == self.kv.num_usable_blocks, "blocks leaked"
        assert not self.kv._promises.num_promised


def test_machine() -> None:
    """Up to 40 steps each; ``DISAGG_MACHINE_RUNS=10000`` for a night of them."""
    runs = int(os.environ.get("DISAGG_MACHINE_RUNS", "150"))
    run_state_machine_as_test(Machine, settings=settings_of(runs))


@pytest.mark.slow
def test_machine_for_long() -> None:
    run_state_machine_as_test(Machine, settings=settings_of(3000))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.__name__)
def test_a_broken_coordinator_is_caught(patch: Callable[[Any], None]) -> None:
    class Broken(Machine):
        coordinator_patch = staticmethod(patch)

    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(Broken, settings=settings_of(800))
