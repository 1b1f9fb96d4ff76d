"""A router follows a plain vLLM engine, and knows what it will find cached before it is asked."""

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from disagg.cluster.processes import end_processes, find_descendants, read_process
from disagg.router.app import RouterApp
from disagg.router.options import RouterOptions
from disagg.testing.scripted_worker import HASH_KEY
from disagg.wire.v1 import router_pb2
from disagg.wire.v1.router_pb2_grpc import RouterStub
from tests.process.harness import ROOT
from tests.vllm.engines import BLOCK_TOKENS
from tests.vllm.families import make_family

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

BOUND_S = 60.0
WINDOW = 64
NUM_BLOCKS = {"llama": 48, "gemma3": 240}
"""Few enough for evictions; every group has blocks of its own among them."""
REPLAY_BATCHES = 40
"""That vLLM keeps; far fewer than there will be."""


class Plain:
    """A vLLM process and what it is asked."""

    def __init__(self, directory: Path, folder: Path, num_blocks: int) -> None:
        self.events = f"ipc://{folder}/events"
        self.replay = f"ipc://{folder}/replay"
        given = {
            "model": str(directory),
            "max_model_len": 512,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 4,
            "num_gpu_blocks_override": num_blocks,
            "kv_events_config": {
                "enable_kv_cache_events": True,
                "endpoint": self.events,
                "replay_endpoint": self.replay,
                "buffer_steps": REPLAY_BATCHES,
            },
        }
        self.log = (folder / "vllm.log").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.plain_server", json.dumps(given)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )

    def ask(self, line: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return json.loads(self.read())

    def read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise AssertionError(f"vLLM ended:\n{self.log.read()[-4000:]}")
        return line

    def generate(self, *requests: dict[str, Any]) -> list[int]:
        """Tokens of each that vLLM found in its cache."""
        found: list[int] = self.ask(json.dumps(requests))
        return found

    def end(self) -> None:
        """End it and what it started: vLLM's engine and workers outlive a killed server."""
        server = read_process(self._process.pid)
        if server is not None:
            end_processes(find_descendants({server[0]}), timeout_s=0.0)
        self._process.wait()
        self.log.close()


@pytest.fixture(params=["llama", "gemma3"])
def plain(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Plain]:
    """Full attention alone; five groups with a window, which come first and skip blocks, and it."""
    make_family(tmp_path / "model", request.param, WINDOW)
    made = Plain(tmp_path / "model", tmp_path, NUM_BLOCKS[request.param])
    yield made
    made.end()


class Router:
    """Follows the plain server, and is asked for prompts; it has no worker."""

    def __init__(self, app: RouterApp, stub: Any) -> None:
        self.app, self.stub = app, stub

    @property
    def view(self) -> Any:
        (view,) = self.app._followed.caches.views()
        return view

    async def match(self, tokens: list[int], cache_salt: str = "") -> int:
        request = router_pb2.MatchRequest(model="tiny", token_ids=tokens, cache_salt=cache_salt)
        found = await self.stub.Match(request)
        return max((one.usable_tokens for one in found.followed), default=0)

    async def until(self, condition: Any, what: str) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + BOUND_S
        while not await condition():
            assert loop.time() < end, f"not seen: {what}; {self.view}"
            await asyncio.sleep(0.02)


async def test_a_router_knows_what_vllm_has_cached(plain: Plain, tmp_path: Path) -> None:
    options = RouterOptions(
        str(tmp_path / "model"),
        "tiny",
        http_port=0,
        admin_port=0,
        grpc_port=0,
        hash_key=HASH_KEY,
        kv_event_endpoints=(f"plain={plain.events}?replay={plain.replay}",),
        kv_event_block_tokens=BLOCK_TOKENS,
    )
    assert await asyncio.to_thread(plain.read) == "ready\n"
    chance = random.Random(7)
    prompts = [[chance.randrange(10, 250) for _ in range(300)] for _ in range(4)]
    # Before the router is there: it learns of it by replay.
    await asyncio.to_thread(plain.generate, {"token_ids": prompts[0]})
    app = RouterApp(options)
    await app.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{app.grpc_port}") as channel:
            router = Router(app, RouterStub(channel))

            async def replayed() -> bool:
                return await router.match(prompts[0]) == 288

            await router.until(replayed, "the replay of what was before")
            await _compare(plain, router, prompts, chance)
            assert await asyncio.to_thread(plain.ask, "reset") is True

            async def is_empty() -> bool:
                return bool(router.view.num_blocks == 0)

            # The reset is published with the next step; vLLM sends nothing in between.
            await asyncio.to_thread(plain.generate, {"token_ids": [9] * 8})
            await router.until(is_empty, "nothing after the reset")
            plain.end()
            assert (router.view.num_losses, router.view.problem) == (0, "")
    finally:
        await app.stop()


async def _compare(
    plain: Plain, router: Router, prompts: list[list[int]], chance: random.Random
) -> None:
    """Ask vLLM for one prompt after the other, each foretold."""
    hits = misses = num_evicted = 0
    served: list[tuple[str, list[int]]] = []
    for number in range(50):
        begin = chance.choice(prompts)
        prompt = begin[: chance.randrange(1, 300)]
        prompt += [chance.randrange(10, 250) for _ in range(chance.randrange(1, 100))]
        salt = chance.choice(["", "", "salt"])
        prompts.append(prompt)
        # Every step before is known when a block of the last request is.
        await _caught_up(router)
        foretold = await router.match(prompt, salt)
        (found,) = await asyncio.to_thread(
            plain.generate, {"token_ids": prompt, "cache_salt": salt, "num_tokens": 2}
        )
        assert found == foretold, (number, len(prompt), router.view)
        hits, misses = hits + (found > 0), misses + (found == 0)
        shared = max((_shared(prompt, one) for was, one in served if was == salt), default=0)
        num_evicted += found + BLOCK_TOKENS <= min(shared, len(prompt) - 1)
        served.append((salt, prompt))
    seen = (hits, misses, num_evicted)
    assert hits > 10, seen
    assert misses > 3, seen
    assert num_evicted > 3, seen
    assert router.view.num_unnamed == 0


def _shared(left: list[int], right: list[int]) -> int:
    """Tokens that two prompts have in common at their beginning."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


async def _caught_up(router: Router) -> None:
    """Wait until nothing new was heard for a while: vLLM publishes up to 0.1 s after a step."""
    heard = -1
    while heard != router.view.num_batches:
        heard = router.view.num_batches
        await asyncio.sleep(0.5)
