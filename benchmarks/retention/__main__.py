"""Hit rates over pool pressure for each retention policy: ``python -m benchmarks.retention``.

A shared-prefix workload: most prompts start with one of a few system prompts (chosen unevenly),
some go on from an earlier conversation, some share nothing. Several are alive at a time; all
policies serve the same requests. Pressure is what the requests' tokens would take if every
block of every group were kept, divided by the pool.
"""

import argparse
import json
import random
from collections import deque

from disagg.kv.blocks.retention import Retention
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.sequence import KVSequence
from disagg.kv.shapes.layout import KVCacheGroup, KVCacheLayout

BLOCK = 16
CHUNK = 2048
OUTPUT = 128
ALIVE = 6
POLICIES = {
    "dense": Retention(),
    "boundaries": Retention(0),
    "every 1024": Retention(1024),
    "every 4096": Retention(4096),
}
POOLS = (4_000, 6_000, 8_000, 12_000, 16_000, 24_000, 48_000, 96_000)
Prompt = list[int]


def workload(num_requests: int, seed: int) -> list[Prompt]:
    """Prompts in order of arrival."""
    chance = random.Random(seed)
    fresh = iter(range(1_000_000, 2**31))

    def tokens(count: int) -> Prompt:
        return [next(fresh) for _ in range(count)]

    systems = [tokens(chance.choice((1500, 3000, 6000))) for _ in range(12)]
    weights = [1 / (1 + rank) for rank in range(len(systems))]
    talks: deque[Prompt] = deque(maxlen=20)
    prompts = []
    for _ in range(num_requests):
        kind = chance.random()
        if kind < 0.25 and talks:
            start = chance.choice(talks)
        elif kind < 0.9:
            (start,) = chance.choices(systems, weights)
        else:
            start = []
        prompt = start + tokens(chance.randrange(200, 1800))
        prompts.append(prompt)
        talks.append(prompt + tokens(OUTPUT))
    return prompts


def coordinator(num_blocks: int, retention: Retention) -> KVCacheCoordinator:
    """One full group and three window groups, as a model with one full layer in four."""
    specs: list[Spec] = [FullAttentionSpec(BLOCK, 8, 128, 2)]
    specs += [SlidingWindowSpec(BLOCK, 8, 128, 2, 1024)] * 3
    groups = tuple(KVCacheGroup(i, spec, (i,)) for i, spec in enumerate(specs))
    layout = KVCacheLayout(groups, specs[0].page_bytes, BLOCK)
    return KVCacheCoordinator(
        layout, num_blocks, max_model_tokens=65_536, max_step_tokens=CHUNK, retention=retention
    )


def hit_rate(prompts: list[Prompt], num_blocks: int, retention: Retention) -> tuple[float, int]:
    """Share of prompt tokens that were hit, and the hit tokens."""
    kv, hasher = coordinator(num_blocks, retention), BlockHasher(b"benchmark", BLOCK)
    alive: deque[int] = deque()
    hits = 0
    for number, prompt in enumerate(prompts):
        made = KVSequence(number, list(prompt))
        hasher.extend(made.hashes, made.token_ids)
        if len(alive) == ALIVE:
            kv.free(alive.popleft())
        hit = kv.find_longest_cache_hit(made, len(prompt) - 1)
        while not kv.admit(number, len(prompt) + OUTPUT, hit):
            kv.free(alive.popleft())
            hit = kv.find_longest_cache_hit(made, len(prompt) - 1)
        hits += hit.num_tokens
        done = hit.num_tokens
        while done < len(prompt):
            new = min(CHUNK, len(prompt) - done)
            assert kv.allocate(made, num_new_tokens=new)
            done += new
            kv.publish(number, done)
            kv.release_out_of_window(number, done)
        made.token_ids += range(7 * number, 7 * number + OUTPUT)
        hasher.extend(made.hashes, made.token_ids)
        assert kv.allocate(made, num_new_tokens=OUTPUT)
        kv.publish(number, done + OUTPUT)
        alive.append(number)
    return hits / sum(map(len, prompts)), hits


def main() -> None:
    """Print a line per pool size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="30 requests, the smallest pool")
    chosen = parser.parse_args()
    prompts = workload(30 if chosen.quick else chosen.requests, chosen.seed)
    everything = sum((len(prompt) + OUTPUT) // BLOCK for prompt in prompts) * 4
    unlimited = hit_rate(prompts, everything + 2, Retention())[0]
    print(json.dumps({"seed": chosen.seed, "requests": len(prompts), "no eviction": unlimited}))
    for num_blocks in POOLS[:1] if chosen.quick else POOLS:
        rates = {
            name: round(hit_rate(prompts, num_blocks, policy)[0], 4)
            for name, policy in POLICIES.items()
        }
        pressure = round(everything / num_blocks, 1)
        print(json.dumps({"blocks": num_blocks, "pressure": pressure, **rates}), flush=True)


if __name__ == "__main__":
    main()
