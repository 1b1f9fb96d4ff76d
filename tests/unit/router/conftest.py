"""A checkpoint's tokenizer, and a real router with scripted workers."""

import asyncio
import contextlib
import shutil
from typing import Any

import httpx
import pytest

from disagg.router.app import RouterApp
from disagg.router.chat import Chat
from disagg.router.options import RouterOptions
from disagg.router.tokenizer import Tokenizer
from disagg.testing.scripted_worker import HASH_KEY
from tests.checkpoints import make_checkpoint
from tests.unit.router.choices_client import token_of
from tests.unit.router.message_examples import ASK, MAX_TOKENS, SCHEMAS, TEMPLATE, TOOLS
from tests.unit.router.scripted_worker import BOUND_S, ScriptedWorker

ROUTER: dict[str, Any] = {"http_port": 0, "admin_port": 0, "grpc_port": 0, "hash_key": HASH_KEY}
"""Options of a router on free ports that takes scripted workers in."""
TEXT = "the cat sat on the mat and the rat ran. "


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    return make_checkpoint(
        tmp_path_factory.mktemp("model"), "qwen3", num_layers=1, max_position_embeddings=512
    )


@pytest.fixture(scope="session")
def tokenizer(model_dir):
    return Tokenizer(model_dir)


class House:
    """A router, an HTTP client to it, and its workers."""

    def __init__(self, app: RouterApp, tokenizer: Tokenizer, text: str) -> None:
        self.app = app
        self.tokenizer = tokenizer
        self.script = tokenizer.encode(text)[1:]
        self.workers: list[ScriptedWorker] = []
        self.url = f"http://127.0.0.1:{app.http_port}"
        self.http = httpx.AsyncClient(base_url=self.url, timeout=BOUND_S)
        admin_url = f"http://127.0.0.1:{app.admin_port}"
        self.admin = httpx.AsyncClient(base_url=admin_url, timeout=BOUND_S)

    def chat_prompt(self, text: str) -> tuple[int, ...]:
        """Tokens of a chat with one message of a user."""
        return self.tokenizer.encode_chat(Chat(({"role": "user", "content": text},)))

    def token(self, prompt_tokens: int):
        """Tokens of the script, from position ``prompt_tokens`` on, again and again."""
        return lambda p: self.script[(p - prompt_tokens) % len(self.script)]

    async def add(
        self, worker_id: str = "w1", *, prompt: int = 2, until_ready: bool = True, **settings
    ) -> ScriptedWorker:
        """Start a worker whose script begins after a prompt of ``prompt`` tokens."""
        settings.setdefault("token", self.token(prompt))
        worker = await ScriptedWorker(worker_id, **settings).start()
        self.workers.append(worker)
        await worker.register(self.app.grpc_port)
        if not until_ready:
            return worker
        await self.until(
            lambda: any(
                view.ready and view.info.incarnation == worker.incarnation
                for view in self.app.dispatcher.core.fleet
            ),
            f"{worker_id} ready",
        )
        return worker

    async def until(self, condition, what: str) -> None:
        """Wait for a state of the router; at most `BOUND_S`."""
        loop = asyncio.get_running_loop()
        end = loop.time() + BOUND_S
        while not condition():
            assert loop.time() < end, f"not seen: {what}; fleet {self.app.dispatcher.core.fleet}"
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        await self.http.aclose()
        await self.admin.aclose()
        await self.app.stop()
        for worker in self.workers:
            await worker.stop()


@pytest.fixture
async def open_house(model_dir, tokenizer):
    """Build houses; ``await open_house(text=..., **router_options)``.

    ``checkpoint`` is a directory to serve instead of ``model_dir``.
    """
    async with contextlib.AsyncExitStack() as stack:

        async def build(text: str = TEXT, checkpoint=model_dir, **settings) -> House:
            # Scripted workers send no heartbeats, and a busy machine takes its time for a test.
            settings = {"worker_silent_ms": 1000 * BOUND_S} | ROUTER | settings
            options = RouterOptions(str(checkpoint), "tiny", **settings)
            app = RouterApp(options)
            await app.start()
            house = House(app, tokenizer, text)
            stack.push_async_callback(house.close)
            return house

        yield build


@pytest.fixture
async def house(open_house):
    """A router with one ready worker, for prompts of two tokens such as ``[5, 6]``."""
    house = await open_house()
    await house.add()
    return house


@pytest.fixture
async def seeded(house):
    """A house whose worker has other tokens for every seed."""
    house.workers[0].token_of = token_of
    return house


@pytest.fixture(scope="session")
def chat_checkpoint(model_dir, tmp_path_factory):
    """A Qwen3 whose template has tools and reasoning."""
    path = shutil.copytree(model_dir, tmp_path_factory.mktemp("tools") / "model")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="session")
def chat_tokenizer(chat_checkpoint):
    return Tokenizer(chat_checkpoint)


@pytest.fixture
async def serve(open_house, chat_checkpoint, chat_tokenizer):
    """Start a house whose worker answers a text and then ends; and what it was asked."""

    async def started(answer, chat=None, **options):
        house = await open_house(checkpoint=chat_checkpoint, **options)
        script = [*chat_tokenizer.encode(answer, add_special_tokens=False)]
        script.append(chat_tokenizer.eos_token_ids[0])
        given = chat or Chat(tuple(ASK), tuple(TOOLS), SCHEMAS)
        num = len(chat_tokenizer.encode_chat(given))
        await house.add(
            max_model_tokens=MAX_TOKENS,
            token=lambda p: script[min(max(p - num, 0), len(script) - 1)],
        )
        return house

    return started
