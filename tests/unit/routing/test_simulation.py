"""Seeded runs against failing workers, and proof that they would find broken rules."""

from collections import Counter
from dataclasses import replace

import pytest

from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.outputs import FinishReason, SequenceOutput
from disagg.routing.actions import Deliver, RouterAction
from disagg.routing.request import RoutedRequest
from disagg.routing.request_lifecycle import RequestLifecycle
from disagg.routing.token_stream import TokenStream
from tests.unit.routing.model_workers import World

FLEETS = [
    ("prefill", "decode"),
    ("prefill", "decode", "both"),
    ("both", "both", "both"),
    ("prefill", "prefill", "decode", "decode"),
]


def run(seed: int) -> World:
    world = World(seed, FLEETS[seed % len(FLEETS)])
    for _ in range(400):
        world.step()
    world.settle()
    return world


def run_many(seeds: range) -> None:
    for seed in seeds:
        run(seed)


@pytest.mark.parametrize("part", range(4))
def test_every_stream_is_exact_or_ends_in_one_error(part: int) -> None:
    run_many(range(part * 50, part * 50 + 50))


def test_the_runs_reach_what_they_are_for() -> None:
    seen: Counter[str] = Counter()
    for seed in range(120):
        world = run(seed)
        seen.update(client.finish for client in world.clients.values() if client.finish)
        seen.update(type(c.error).__name__ for c in world.clients.values() if c.error)
        for (name, label), count in world.core.counters.items():
            seen[f"{name} {label}"] += count
    for what in (
        "stop", "length", "RemoteFault", "plans local", "plans handover", "late_messages ",
        "replans worker_lost", "replans gap", "replans lease_dead", "replans reserve_refused",
        "workers_lost silent", "workers_lost session_ended", "poison ",
        "registrations_refused worker_id_taken",
    ):  # fmt: skip
        assert seen[what], f"{what} never happened: {seen}"
    assert not seen["protocol_errors "]


def assert_found(num_seeds: int = 60) -> None:
    with pytest.raises(AssertionError, match="seed"):
        run_many(range(num_seeds))


def test_control_no_generation_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def any_generation(
        self: RequestLifecycle, incarnation: Incarnation, key: RequestKey
    ) -> RoutedRequest | None:
        return self._live.get(key.request_id)

    monkeypatch.setattr(RequestLifecycle, "_concerned", any_generation)
    assert_found()


def test_control_no_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    def append(self: TokenStream, output: SequenceOutput) -> Deliver:
        self.tokens = (*self.tokens, *output.token_ids)
        return Deliver(output.key.request_id, output.token_ids, (), output.finish_reason)

    monkeypatch.setattr(TokenStream, "accept", append)
    assert_found()


def test_control_no_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestLifecycle, "_cancels", lambda *_, **__: [])
    assert_found()


def test_control_no_cancel_of_the_other_part_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    original = RequestLifecycle._cancels

    def skip_finished(
        self: RequestLifecycle, request: RoutedRequest, reason: str, **kinds: bool
    ) -> list[RouterAction]:
        return [] if reason == "finished" else original(self, request, reason, **kinds)

    monkeypatch.setattr(RequestLifecycle, "_cancels", skip_finished)
    assert_found()


def test_control_losses_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestLifecycle, "lost", lambda *_: [])
    assert_found()


def test_control_a_token_lost_with_its_worker_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestLifecycle, "_check_gap", lambda *_: [])
    assert_found(200)


def test_control_stop_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    original = TokenStream.accept

    def keep_going(self: TokenStream, output: SequenceOutput) -> Deliver | None:
        delivery = original(self, output)
        if delivery and delivery.finish_reason is FinishReason.STOP:
            return replace(delivery, finish_reason=FinishReason.NONE)
        return delivery

    monkeypatch.setattr(TokenStream, "accept", keep_going)
    assert_found()
