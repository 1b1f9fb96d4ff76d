"""A cache that is known by vLLM's events alone is known as well as by a worker's own."""

import random
from functools import partial
from typing import Any

import pytest

from disagg.errors import ConfigError
from disagg.kv.blocks.hits import CacheHit
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.event_publishing import VllmEventShape
from disagg.kv.hashing import BlockHasher, tenant_salt
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.sequence import KVSequence
from disagg.kv.shapes.layout import KVCacheGroup, KVCacheLayout
from disagg.messages.identity import Incarnation
from disagg.messages.registration import GroupInfo
from disagg.messages.router import CacheMatch
from disagg.routing.followed.event_order import AskReplay
from disagg.routing.followed.followed_caches import FollowedCache, FollowedCaches
from disagg.routing.followed.vllm_events import read_message
from disagg.routing.index import PrefixIndex

BLOCK = 4
HASHER = BlockHasher(b"key of the workers", BLOCK)
WORKER = Incarnation("w", "e")
FULL = FullAttentionSpec(BLOCK, 1, 8, 2)
WINDOW = SlidingWindowSpec(BLOCK, 1, 8, 2, 9)
DEEP: Any = []
"""As deep as msgpack goes; to make a text of it is too deep for Python."""
for _ in range(1_000):
    DEEP = [DEEP]
LAYOUTS: dict[str, tuple[Spec, ...]] = {
    "full": (FULL,),
    "window first": (WINDOW, FULL),
    "state": (FULL, LinearStateSpec(BLOCK, 64)),
    "all": (WINDOW, FULL, LinearStateSpec(BLOCK, 64)),
}


def followed(**options: Any) -> tuple[FollowedCaches, FollowedCache]:
    caches = FollowedCaches(HASHER.extend, BLOCK, **options)
    cache = caches.follow("w", partial(tenant_salt, ""), can_replay=False)
    cache.connected(0)
    return caches, cache


def stored(
    number: int,
    hashes: list[int],
    tokens: list[int],
    parent: int | None = None,
    *,
    cache: FollowedCache,
    **more: object,
) -> AskReplay | None:
    event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": BLOCK,
        "medium": "GPU",
        **more,
    }
    return cache.live(0, number, read_message([0.0, [event], 0]))


def usable(caches: FollowedCaches, tokens: list[int], cache_salt: str = "") -> int:
    hashes = caches.hashes(tokens, tenant_salt("", cache_salt))
    return max((one.usable_tokens for one in caches.match(len(tokens), hashes)), default=0)


class Served:
    """A worker's cache under random requests; its events go to the router's index, and as vLLM's.

    Attributes:
        batches: what was published, numbered by place.
    """

    def __init__(self, specs: tuple[Spec, ...], *, int_hashes: bool, seed: int) -> None:
        groups = tuple(KVCacheGroup(i, spec, (i,)) for i, spec in enumerate(specs))
        page_bytes = max(spec.page_bytes for spec in specs)
        self.kv = KVCacheCoordinator(
            KVCacheLayout(groups, page_bytes, BLOCK),
            80,
            max_model_tokens=256,
            max_step_tokens=16,
            events_with_tokens=True,
        )
        self.shape = VllmEventShape(groups, int_hashes=int_hashes)
        self.index = PrefixIndex(
            [
                GroupInfo(spec.kind, BLOCK, getattr(spec, "window_tokens", 0), 1, 0)
                for spec in specs
            ],
            BLOCK,
        )
        self.index.add(WORKER, 10_000)
        self.batches: list[list[object]] = []
        self.prompts: list[list[int]] = []
        self.chance = random.Random(seed)
        self.next_event = 0

    def serve(self) -> None:
        """One request with a prompt that perhaps begins like one before it."""
        before = self.chance.choice(self.prompts) if self.prompts else []
        begin = before[: self.chance.randrange(len(before) + 1)]
        prompt = begin + [self.chance.randrange(1000) for _ in range(self.chance.randrange(5, 40))]
        prompt = prompt[:120]
        self.prompts.append(prompt)
        request = KVSequence(f"r{len(self.prompts)}", prompt)
        HASHER.extend(request.hashes, prompt)
        hit: CacheHit | None = self.kv.find_longest_cache_hit(request, len(prompt) - 1)
        assert hit is not None
        done = hit.num_tokens
        while done < len(prompt):
            new = min(16, len(prompt) - done)
            assert self.kv.allocate(request, num_new_tokens=new, hit=hit)
            done, hit = done + new, None
            self.kv.publish(request.key, done)
            self.kv.release_out_of_window(request.key, done)
            self.tell()
        self.kv.free(request.key)
        if self.chance.random() < 0.03:
            self.kv.forget_prefixes()
        self.tell()

    def tell(self) -> None:
        batch = self.kv.events.since(self.next_event)
        assert batch is not None
        if batch.events:
            assert self.index.apply(WORKER, batch.first_seq, None, batch.events)
            self.batches.append(self.shape.batch(0.0, batch.events))
        self.next_event = batch.next_seq

    def differences(self, caches: FollowedCaches) -> int:
        """Prompts of which the two know different things."""
        num = 0
        for prompt in self.prompts:
            hashes: list[bytes] = []
            HASHER.extend(hashes, prompt)
            hit = self.index.match(len(prompt), hashes)[WORKER]
            theirs = caches.match(len(prompt), hashes)
            if hit.usable_tokens or any(hit.group_tokens) or theirs:
                num += theirs != [CacheMatch("w", hit.usable_tokens, hit.group_tokens)]
        return num


@pytest.mark.parametrize("int_hashes", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_events_say_what_a_workers_own_say(layout: str, int_hashes: bool, seed: int) -> None:
    served = Served(LAYOUTS[layout], int_hashes=int_hashes, seed=seed)
    caches, cache = followed()
    told = compared = 0
    for _ in range(60):
        served.serve()
        while told < len(served.batches):
            cache.live(0, told, read_message(served.batches[told]))
            told += 1
        if len(cache.layout) == len(LAYOUTS[layout]):  # a group without blocks is not known yet
            compared += len(served.prompts)
            assert served.differences(caches) == 0
    view = cache.view()
    assert (view.num_batches, view.num_losses, view.problem) == (told, 0, "")
    assert view.num_unnamed == 0
    assert compared > 500


def test_a_lost_batch_would_show() -> None:
    """Control: one message less, numbered as if none was missing, and the two differ."""
    served = Served(LAYOUTS["window first"], int_hashes=True, seed=1)
    for _ in range(30):
        served.serve()
    without = 0
    for missing in range(0, len(served.batches), 3):
        caches, cache = followed()
        rest = [one for number, one in enumerate(served.batches) if number != missing]
        for number, batch in enumerate(rest):
            cache.live(0, number, read_message(batch))
        without += served.differences(caches) > 0
    assert without > 3


def test_a_noticed_gap_forgets_and_nothing_wrong_is_said() -> None:
    """Without a replay what comes after the gap is known, and no more than the truth."""
    served = Served(LAYOUTS["window first"], int_hashes=True, seed=2)
    for _ in range(40):
        served.serve()
    caches, cache = followed()
    for number, batch in enumerate(served.batches):
        if number != len(served.batches) // 2:
            cache.live(0, number, read_message(batch))
    assert cache.view().num_losses == 1
    for prompt in served.prompts:
        hashes: list[bytes] = []
        HASHER.extend(hashes, prompt)
        truth = served.index.match(len(prompt), hashes)[WORKER]
        for one in caches.match(len(prompt), hashes):
            assert one.usable_tokens <= truth.usable_tokens


def test_groups_that_skip_blocks_are_named_by_the_others() -> None:
    """As vLLM does it: a window group that comes first tells of some blocks, and not of which."""
    caches, cache = followed()
    tokens = list(range(24))
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 5}
    events = [
        {"block_hashes": [3, 4, 6], "group_idx": 0} | window,
        {"block_hashes": [1, 2, 3, 4, 5, 6], "group_idx": 1},
    ]
    same = {"type": "BlockStored", "token_ids": tokens, "block_size": BLOCK, "medium": "GPU"}
    cache.live(0, 0, read_message([0.0, [same | event for event in events], 0]))
    for num_tokens, expected in ((24, 16), (20, 16), (16, 12), (12, 0), (25, 24)):
        assert usable(caches, [*tokens, 99][:num_tokens]) == expected
    removed = {"type": "BlockRemoved", "block_hashes": [4], "medium": "GPU", "group_idx": 0}
    cache.live(0, 1, read_message([0.0, [removed], 0]))
    assert usable(caches, [*tokens, 99]) == 24
    assert usable(caches, tokens) == 12


def test_blocks_without_a_name_are_left_out() -> None:
    caches, cache = followed()
    stored(0, [7], [9] * 4, parent=5, cache=cache)  # what comes before was never told of
    stored(1, [1], [1, 2, 3, 4], cache=cache, lora_name="adapter")
    stored(2, [2], [1, 2, 3, 4], cache=cache, extra_keys=[[["an image", 0]]])
    stored(3, [3], [5, 6, 7, 8], parent=1, cache=cache)
    assert cache.view().num_unnamed == 4
    assert usable(caches, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 0
    stored(4, [4], [1, 2, 3, 4], cache=cache, medium="CPU")
    stored(5, [4], [1, 2, 3, 4], cache=cache, locality="REMOTE")
    assert usable(caches, [1, 2, 3, 4, 5]) == 0
    stored(6, [4], [1, 2, 3, 4], cache=cache)
    assert usable(caches, [1, 2, 3, 4, 5]) == 4


def test_a_salt_is_part_of_the_name() -> None:
    caches, cache = followed()
    stored(0, [1, 2], list(range(8)), cache=cache, extra_keys=[["pepper"], None])
    stored(1, [3], [8, 9, 10, 11], parent=2, cache=cache, extra_keys=[None])
    tokens = [*range(12), 99]
    assert (usable(caches, tokens), usable(caches, tokens, "pepper")) == (0, 12)


def test_servers_of_a_tenant_are_its_own() -> None:
    caches = FollowedCaches(HASHER.extend, BLOCK)
    cache = caches.follow(
        "theirs", partial(tenant_salt, "tenant"), can_replay=False, tenant="tenant"
    )
    cache.connected(0)
    stored(0, [1], [1, 2, 3, 4], cache=cache)
    tokens = [1, 2, 3, 4, 5]
    assert usable(caches, tokens) == 0
    hashes = caches.hashes(tokens, tenant_salt("tenant", ""))
    for other in ("", "another"):
        assert [one.name for one in caches.match(5, hashes, other) if one.name == "theirs"] == []
    (match,) = caches.match(5, hashes, "tenant")
    assert match == CacheMatch("theirs", 4, (4,))


def test_a_server_that_goes_is_forgotten() -> None:
    caches, cache = followed()
    stored(0, [1], [1, 2, 3, 4], cache=cache)
    cache.disconnected()
    assert caches.match(5, caches.hashes([1, 2, 3, 4, 5], b"")) == []
    cache.connected(0)
    stored(0, [2], [5, 6, 7, 8], cache=cache)
    assert usable(caches, [1, 2, 3, 4, 5]) == 0
    assert usable(caches, [5, 6, 7, 8, 9]) == 4
    cache.live(0, 1, read_message([0.0, [{"type": "AllBlocksCleared"}], 0]))
    assert usable(caches, [5, 6, 7, 8, 9]) == 0


def test_blocks_of_two_hash_blocks() -> None:
    caches, cache = followed()
    stored(0, [1, 2], list(range(16)), cache=cache, block_size=8)
    stored(1, [3], list(range(16, 24)), parent=2, cache=cache, block_size=8)
    assert usable(caches, list(range(30))) == 24
    # A boundary inside a block, which partial entries of vLLM reach, is none here.
    stored(2, [9], list(range(24, 28)), parent=3, cache=cache, block_size=4)
    assert usable(caches, list(range(30))) == 24


def test_a_block_is_there_until_its_last_copy_goes() -> None:
    """vLLM computes a block again that one group has, as another group has it no more."""
    caches, cache = followed()
    for number in range(3):
        stored(number, [1], [1, 2, 3, 4], cache=cache)
    removed = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}
    for number, expected in ((3, 4), (4, 4), (5, 0), (6, 0)):
        cache.live(0, number, read_message([0.0, [removed], 0]))
        assert usable(caches, [1, 2, 3, 4, 5]) == expected
    stored(7, [1], [1, 2, 3, 4], cache=cache)
    assert usable(caches, [1, 2, 3, 4, 5]) == 4


def test_a_bound_on_what_is_kept_in_mind() -> None:
    caches, cache = followed(blocks_max=2)
    stored(0, [1, 2, 3], list(range(12)), cache=cache)
    view = cache.view()
    assert (view.num_blocks, view.num_unnamed) == (2, 1)
    assert usable(caches, list(range(12))) == 8


def test_a_name_is_there_once() -> None:
    caches, _ = followed()
    with pytest.raises(ConfigError, match="'w' is there twice"):
        caches.follow("w", partial(tenant_salt, ""), can_replay=True)


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (None, "no array"),
        ([0.0], "no array"),
        ([0.0, 1, 0], "no array"),
        ([0.0, [["BlockStored", [1]]], 0], "vLLM before 0.32"),
        ([0.0, [{"type": "BlockStored", "block_hashes": [1], "block_size": 4}], 0], "token_ids"),
        ({"block_hashes": [1.5]}, "block_hashes"),
        ({"block_hashes": [b"x" * 65]}, "block_hashes"),
        ({"block_hashes": [1, 2]}, "block_hashes: 2 for 4 tokens"),
        ({"token_ids": [1, 2, 3]}, "3 are no blocks of 4"),
        ({"token_ids": [1, 2, 3, -4]}, "token_ids"),
        ({"token_ids": [1, 2, 3, 1 << 32]}, "token_ids"),
        ({"block_size": 0}, "no blocks of 0"),
        ({"block_size": "4"}, "block_size: no count"),
        ({"block_size": 2, "token_ids": [1, 2]}, "no multiple of 4"),
        ({"parent_block_hash": "x"}, "parent_block_hash"),
        ({"group_idx": -1}, "group_idx: no count"),
        ({"group_idx": 1 << 20}, "at most 64"),
        ({"extra_keys": "x"}, "extra_keys"),
        ({"kv_cache_spec_kind": "unknown"}, "'unknown' cannot be followed"),
        ({"kv_cache_spec_kind": DEEP}, "kv_cache_spec_kind: no text"),
        ({"group_idx": 0, "kv_cache_spec_sliding_window": 8}, "group 0 has changed"),
        ({"kv_cache_spec_kind": "chunked_local_attention"}, "needs a window"),
    ],
)
def test_what_is_not_understood_is_told_and_nothing_is_kept(payload: Any, why: str) -> None:
    caches, cache = followed()
    stored(0, [1], [1, 2, 3, 4], cache=cache)
    if isinstance(payload, dict):
        good = {"block_hashes": [2], "token_ids": [5, 6, 7, 8], "block_size": 4}
        payload = [0.0, [{"type": "BlockStored", "group_idx": 1, **good, **payload}], 0]
    cache.live(0, 1, read_message(payload))
    view = cache.view()
    assert why in view.problem
    assert (view.num_blocks, caches.match(5, [])) == (0, [])
    stored(2, [1], [1, 2, 3, 4], cache=cache)  # it goes on
    assert usable(caches, [1, 2, 3, 4, 5]) == 4


def test_larger_blocks_of_many_groups_cost_one_look_at_what_is_held() -> None:
    """Each look takes as long as all that the server holds."""
    _, cache = followed()
    stored(0, [1, 2], list(range(2 * BLOCK)), cache=cache, group_idx=1)
    names, looks = cache._names, 0

    class Held(dict[Any, Any]):
        def items(self) -> Any:
            nonlocal looks
            looks += 1
            return super().items()

    names._held = Held(names._held)
    events = [
        {"type": "BlockStored", "block_hashes": [], "token_ids": [], "block_size": size * BLOCK}
        for size in range(1, 50)
    ]
    cache.live(1, 1, read_message([0, events]))
    assert cache.layout[0].block_tokens == 49 * BLOCK
    assert looks == 1
    assert len(names) == 2
