"""Which requests a simulated world gets, and when."""

import random
from collections.abc import Callable
from functools import partial
from typing import Protocol

from disagg.testing.simulation.bounds import Client
from disagg.testing.simulation.config import SimulationConfig

SCRIPT_PAUSE_MS = 50


class LoadedWorld(Protocol):
    """What the load needs of the world."""

    config: SimulationConfig
    clients: dict[str, Client]
    random: random.Random

    def draw(self, low: int, high: int) -> int:
        """A seeded random number, both ends included."""

    def later(self, delay_ms: int, event: Callable[[], None]) -> None:
        """Let something happen after a delay."""

    def ask(self, request_id: str, client: Client) -> None:
        """A request arrives."""

    def unfinished(self) -> list[str]:
        """Requests that have not ended."""


def plan_requests(world: LoadedWorld) -> None:
    """Plan the random requests, or those of the script."""
    config = world.config
    stems = [_tokens(world, config.prompt_tokens_max) for _ in range(3)]
    for number in range(0 if config.script else config.num_requests):
        stem = world.random.choice(stems)
        prompt = stem[: world.draw(0, len(stem) - 10)] + _tokens(world, world.draw(1, 10))
        client = Client(prompt, world.draw(1, config.output_tokens_max))
        if config.scored_per_mille and world.draw(1, 1000) <= config.scored_per_mille:
            client.is_scored, client.max_tokens = True, client.max_tokens * world.draw(0, 1)
        arrival_ms = world.draw(50, config.arrivals_ms)
        world.later(arrival_ms, partial(_ask_or_continue, world, f"r{number}", client))
    for number, one in enumerate(config.script):
        if one.at_ms is not None:
            client = Client(one.prompt, one.max_tokens)
            world.later(one.at_ms, partial(world.ask, f"r{number}", client))
    world.later(SCRIPT_PAUSE_MS, partial(_go_on, world))


def _tokens(world: LoadedWorld, num: int) -> tuple[int, ...]:
    return tuple(world.random.randrange(world.config.vocab_size) for _ in range(num))


def _go_on(world: LoadedWorld) -> None:
    """Ask the next of the script when its turn has come, and look again later."""
    script, number = world.config.script, len(world.clients)
    if number < len(script) and script[number].at_ms is None:
        if not world.unfinished():
            one = script[number]
            world.ask(f"r{number}", Client(one.prompt, one.max_tokens))
        world.later(SCRIPT_PAUSE_MS, partial(_go_on, world))


def _ask_or_continue(world: LoadedWorld, request_id: str, client: Client) -> None:
    """Let a request be the next turn after one that is finished, perhaps."""
    if world.draw(1, 1000) <= world.config.continued_per_mille:
        over = [one for one in world.clients.values() if one.outcome == "finished"]
        if over:
            before = world.random.choice(over)
            history = (*before.prompt, *before.received)
            room = world.config.prompt_tokens_max - len(history)
            if room > 0:
                client.prompt = history + client.prompt[-min(room, 3) :]
    world.ask(request_id, client)
