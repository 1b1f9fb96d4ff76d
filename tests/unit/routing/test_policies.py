"""What every policy must keep, and how the core is given one."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from disagg.errors import ConfigError, ContextLengthError, InvariantViolation, RemoteFault
from disagg.messages.outputs import FinishReason
from disagg.messages.session import EndReason
from disagg.messages.submit import Role
from disagg.routing.policy import registry
from disagg.routing.policy.local import Local
from disagg.routing.policy.protocol import Candidate, Demand, Plan
from tests.unit.routing.builders import STATS, Router, request, worker
from tests.unit.routing.model_workers import World

PROMPT = tuple(range(100, 141))
EVERY_POLICY = pytest.mark.parametrize("policy", registry.POLICIES)


@EVERY_POLICY
def test_a_request_is_served_and_goes_on_after_a_fault(policy: str) -> None:
    workers = {name: worker(name, role) for name, role in (("p", "prefill"), ("d", "decode"))}
    router = Router(*workers.values(), policy=policy)
    router.generate()
    who, submit = router.submits[0]
    router.ended(workers[who], submit, EndReason.STEP_FAILED)
    ((again, submit),) = router.submits
    assert again != who
    router.tokens(workers[again], submit, 10, 1, 2, 3, 4, 5, finish=FinishReason.LENGTH)
    assert (router.delivered, router.finish) == ([1, 2, 3, 4, 5], [FinishReason.LENGTH])


@EVERY_POLICY
@pytest.mark.parametrize("seed", range(10))
def test_every_stream_is_exact_or_ends_in_one_error(policy: str, seed: int) -> None:
    world = World(seed, policy=policy)
    for _ in range(400):
        world.step()
    world.settle()


@EVERY_POLICY
def test_nothing_decodes_where_it_cannot_end(policy: str) -> None:
    small, large = worker("a", max_model_tokens=14), worker("b", max_model_tokens=15)
    router = Router(small, large, policy=policy)
    router.holds(small, request().token_ids)
    router.core.from_worker(0, large.incarnation, replace(STATS, num_running=50, num_waiting=50))
    router.generate()
    decoding = [who for who, submit in router.submits if submit.role is not Role.PREFILL]
    assert decoding == ["b"]
    with pytest.raises(ContextLengthError, match="need 16 tokens, the largest worker"):
        router.generate(request("r2", max_tokens=6))
    with pytest.raises(RemoteFault):
        Router(policy=policy).generate()


@EVERY_POLICY
def test_with_all_workers_excluded_one_is_tried(policy: str) -> None:
    router = Router(worker("a"), policy=policy)
    router.generate()
    for _ in range(2):
        ((_, submit),) = router.submits
        router.ended(worker("a"), submit, EndReason.STEP_FAILED)
    assert [who for who, _ in router.submits] == ["a"]


def test_local_hands_nothing_over_and_pulls_nothing() -> None:
    workers = worker("p", "prefill"), worker("d1", "decode"), worker("d2", "decode")
    router = Router(*workers, policy="local", pull_tokens_min=1)
    router.holds(worker("d2"), PROMPT)
    router.core.from_worker(0, worker("d2").incarnation, replace(STATS, num_running=9))
    router.generate(request(num_tokens=41))
    ((who, submit),) = router.submits
    assert (who, submit.role, submit.pull) == ("d2", Role.LOCAL, None)
    for name in ("r2", "r3"):  # too short for a block: nobody has it, the least load decides
        router.generate(request(name, num_tokens=3))
    assert {view.info.incarnation.worker_id: view.num_live for view in router.core.fleet} == {
        "d1": 1,
        "d2": 1,
        "p": 1,
    }
    control = Router(*workers, pull_tokens_min=1)
    control.generate(request(num_tokens=41))
    assert [submit.role for _, submit in control.submits] == [Role.DECODE, Role.PREFILL]


def test_local_leaves_a_worker_without_room() -> None:
    workers = worker("a"), worker("b")
    router = Router(*workers, policy="local")
    router.generate()
    ((who, submit),) = router.submits
    router.ended(worker(who), submit, EndReason.CAPACITY)
    assert [again for again, _ in router.submits] == ["b"]


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no policy is named 'dice'; known: cache_affinity, "):
        Router(policy="dice")


class FirstWhateverItsRoom(Local):
    """Breaks what a plan must keep."""

    def plan(self, demand: Demand, candidates: Sequence[Candidate]) -> Plan:
        return Plan(candidates[0], candidates[0], "the first")


def test_a_policy_of_ones_own_is_one_line_and_is_held_to_the_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(registry.POLICIES, "first", FirstWhateverItsRoom)
    router = Router(worker("a", max_model_tokens=14), worker("b"), policy="first")
    router.generate(request(max_tokens=4))
    assert [who for who, _ in router.submits] == ["a"]
    with pytest.raises(InvariantViolation, match="no room"):
        router.generate(request("r2"))
