"""Revisions side by side: who serves what, never across, by weight, and gone with their workers."""

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from disagg.errors import ConfigError, RemoteFault, RequestError
from disagg.messages.outputs import FinishReason
from disagg.messages.registration import Contract, WorkerInfo
from disagg.messages.session import EndReason
from disagg.messages.submit import Submit
from disagg.routing.actions import ToWorker
from disagg.routing.revisions import REVISIONS_MAX, parse_revision_weights
from tests.unit.routing.builders import CONTRACT, STATS, Router, hasher_of, request, worker

NEW = replace(CONTRACT, model_fingerprint="model-b", hash_block_tokens=2, hash_scheme="b")
P1, D1 = worker("p1", "prefill", revision="v1"), worker("d1", "decode", revision="v1")
P2, D2 = (
    worker(name, role, revision="v2", contract=NEW, max_model_tokens=600)
    for name, role in (("p2", "prefill"), ("d2", "decode"))
)
REVISION_OF = {info.incarnation.worker_id: info.revision for info in (P1, D1, P2, D2)}


def both(**options: object) -> Router:
    return Router(P1, D1, P2, D2, **options)  # type: ignore[arg-type]


def weighted(v1: float, v2: float, **options: object) -> Router:
    return both(revision_weights={"v1": v1, "v2": v2}, **options)


def began_later(router: Router) -> None:
    """Workers that were not heard since a plan speak against no request when they are lost."""
    router.now_ms += 1


def revisions_of(router: Router) -> set[str]:
    """Of the workers that the last actions submit to."""
    return {REVISION_OF[name] for name, _ in router.submits}


def test_a_request_is_planned_within_its_revision_and_named_as_that_one_names() -> None:
    router = weighted(0, 1)
    router.generate()
    assert [name for name, _ in router.submits] == ["d2", "p2"]
    tokens = request().token_ids
    expected: list[bytes] = []
    hasher_of(P2)(expected, tokens, b"")
    assert router.submits[0][1].hashes == tuple(expected)
    assert router.record("r").revision == "v2"
    control = weighted(1, 0)
    control.generate()
    assert control.submits[0][1].hashes == request().hashes != tuple(expected)
    assert control.record("r").revision == "v1"


def test_the_same_id_gets_the_same_revision_and_weight_moves_one_way() -> None:
    router = both()
    ids = [f"r{i}" for i in range(2000)]

    def at_v2() -> set[str]:
        return {one for one in ids if router.core.assign(one).name == "v2"}

    assert at_v2() == at_v2()
    found = [at_v2()]
    for v2 in (0, 10, 50, 90, 100):
        router.core.set_revision_weights({"v1": 100 - v2, "v2": v2})
        found.append(at_v2())
    equal, *moved = found
    assert abs(len(equal) - 1000) < 150
    assert [
        abs(len(a) - share * 20) < 150 for a, share in zip(moved, (0, 10, 50, 90, 100), strict=True)
    ]
    assert (moved[0], moved[-1]) == (set(), set(ids))
    for before, after in itertools.pairwise(moved):
        assert before < after


def test_shares_follow_weights_of_many_revisions() -> None:
    weights = {f"v{i}": float(i) for i in range(5)}
    infos = [worker(f"w{i}", revision=f"v{i}") for i in range(5)]
    router = Router(*infos, revision_weights=weights)
    num = Counter(router.core.assign(f"request {i}").name for i in range(5000))
    assert num["v0"] == 0
    for name, weight in weights.items():
        assert abs(num[name] - 500 * weight) < 120, num


def test_a_revision_without_a_ready_worker_gets_nothing_whatever_its_weight() -> None:
    router = Router(P1, D1, revision_weights={"v1": 1, "v2": 99})
    router.core.register(0, P2)  # has no session yet
    for i in range(50):
        assert router.core.assign(f"r{i}").name == "v1"


def test_who_is_not_named_where_weights_are_gets_nothing() -> None:
    router = both(revision_weights={"v1": 1})
    assert {router.core.assign(f"r{i}").name for i in range(50)} == {"v1"}
    with pytest.raises(RequestError, match="would be served"):
        router.core.set_revision_weights({"v3": 1})
    router.core.set_revision_weights({})
    assert {router.core.assign(f"r{i}").name for i in range(50)} == {"v1", "v2"}


def test_without_weight_nothing_new_comes_and_what_runs_goes_on() -> None:
    router = weighted(1, 0)
    router.generate()
    submit = router.submits[0][1]
    router.core.set_revision_weights({"v2": 1})
    router.tokens(P1, submit, 10, 1)
    router.ended(D1, submit, EndReason.READ_FAILED)
    assert revisions_of(router) == {"v1"}, "it is planned anew where it began"
    router.generate(request("other"))
    assert revisions_of(router) == {"v2"}
    router.lost(P2)
    router.lost(D2)
    assert not router.core.ready
    with pytest.raises(RemoteFault, match="v1 have no weight"):
        router.generate(request("third"))


def test_no_answer_goes_on_at_another_revision() -> None:
    router = weighted(1, 0)
    began_later(router)
    router.generate()
    submit = router.submits[0][1]
    router.tokens(P1, submit, 10, 1)
    router.core.set_revision_weights({"v1": 1, "v2": 1})
    router.lost(P1)
    assert revisions_of(router) == {"v1"}
    router.lost(D1)
    assert router.submits == []
    assert "no worker is ready in revision 'v1'" in router.error.message
    assert isinstance(router.error, RemoteFault)
    assert router.record("r").outcome == "failed"


def test_what_has_delivered_nothing_is_planned_anew_at_another_revision() -> None:
    router = weighted(1, 0, replans_max=9)
    began_later(router)
    router.generate()
    router.core.set_revision_weights({"v1": 1, "v2": 1})
    router.lost(P1)
    assert revisions_of(router) == {"v1"}
    router.lost(D1)
    assert [name for name, _ in router.submits] == ["d2", "p2"]
    submit = router.submits[0][1]
    expected: list[bytes] = []
    hasher_of(P2)(expected, request().token_ids, b"")
    assert submit.hashes == tuple(expected)
    router.tokens(P2, submit, 10, 5)
    router.tokens(D2, submit, 11, 6, 7, 8, 9, finish=FinishReason.LENGTH)
    assert router.finish == [FinishReason.LENGTH]
    record = router.record("r")
    assert (record.revision, record.outcome) == ("v2", "length")


def test_nor_is_it_where_that_has_no_weight() -> None:
    """The control: it is the weight that lets it move."""
    router = weighted(1, 0)
    began_later(router)
    router.generate()
    router.lost(P1)
    router.lost(D1)
    assert router.submits == []
    assert isinstance(router.error, RemoteFault)


def test_a_prompt_prepared_for_a_revision_that_went_meanwhile_is_named_anew() -> None:
    """The new one has the name of the old one, and another block size."""
    router = Router(P1)
    prepared = replace(request(), revision=router.core.assign("r"))
    router.lost(P1)
    same_name = replace(P2, revision="v1", role="both")
    router.join(same_name)
    router.generate(prepared)
    expected: list[bytes] = []
    hasher_of(same_name)(expected, prepared.token_ids, b"")
    assert router.submits[0][1].hashes == tuple(expected) != prepared.hashes


def test_a_contract_goes_with_its_last_worker() -> None:
    router = Router(worker("old"))
    new = worker("new", contract=NEW, max_model_tokens=77)
    with pytest.raises(ConfigError, match=r"Another model\.revision"):
        router.core.register(0, new)
    router.lost(worker("old"))
    router.join(new)
    (view,) = router.core.revision_views()
    assert (view.name, view.contract, view.max_model_tokens) == ("default", NEW, 77)
    assert router.core.max_model_tokens == 77
    router.generate(request("later"))
    assert [name for name, _ in router.submits] == ["new"]
    with pytest.raises(ConfigError, match="model_fingerprint"):
        router.core.register(0, worker("old", epoch="e2"))


def test_a_worker_is_held_against_every_kind_of_the_others_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thousand workers register with a few contracts."""
    compared: list[str] = []
    refusal = Contract.refusal

    def counted(self: Contract, name: str, other: Contract, other_name: str) -> str:
        compared.append(other_name)
        return refusal(self, name, other, other_name)

    monkeypatch.setattr(Contract, "refusal", counted)
    old = replace(CONTRACT, wire_max=2)
    kinds = (CONTRACT, old)
    router = Router(
        *(worker(f"w{number}", "both", contract=replace(kinds[number % 2])) for number in range(20))
    )
    assert len(compared) == 1 + 2 * 18
    unlike = replace(old, page_format="unlike both")
    with pytest.raises(ConfigError, match="w20 and w0 cannot exchange"):
        router.core.register(0, worker("w20", "both", contract=unlike))


def test_prefixes_are_found_within_a_revision_only() -> None:
    """Workers of one contract under two names: even equal blocks are not shared."""
    a, b = worker("a", revision="v1"), worker("b", revision="v2")
    router = Router(a, b, revision_weights={"v2": 1})
    prompt = request(num_tokens=40)
    router.holds(a, prompt.token_ids)
    router.generate(prompt)
    ((name, submit),) = router.submits
    assert (name, submit.pull) == ("b", None)
    assert [
        m.usable_tokens for m in router.core.match(router.core.assign("r"), 40, prompt.hashes)
    ] == [0]
    control = Router(a, replace(b, revision="v1"))
    control.holds(a, prompt.token_ids)
    control.generate(prompt)
    assert control.record("r").generations[0].expected_hit_tokens == 36


def test_a_full_revision_does_not_hold_up_the_other() -> None:
    router = Router(
        worker("a", revision="v1", max_sequences=1),
        worker("b", revision="v2", max_sequences=1),
        worker_waiting_max=0,
        requests_max=100,
    )
    served: Counter[str] = Counter()
    waiting = list[str]()
    ids = [f"r{i}" for i in range(20)]
    expected = {router.core.assign(one).name for one in ids[:2]}
    for one in ids:
        router.generate(request(one))
        served.update(name for name, _ in router.submits)
        waiting += [] if router.submits else [one]
    assert served == {"a": 1, "b": 1}, "one each, whoever came first"
    assert len(waiting) == 18
    assert expected <= {"v1", "v2"}


def test_the_name_belongs_to_the_life_of_a_worker_and_revisions_are_bounded() -> None:
    router = Router(P1)
    with pytest.raises(ConfigError, match="epoch"):
        router.core.register(0, replace(P1, revision="v2"))
    for i in range(REVISIONS_MAX - 1):
        router.join(worker(f"w{i}", revision=f"r{i}"))
    with pytest.raises(ConfigError, match="more than 16 revisions"):
        router.core.register(0, worker("one-more", revision="r99"))
    assert len(router.core.revision_views()) == REVISIONS_MAX


@pytest.mark.parametrize(
    "given",
    [
        ["v1"],
        ["=1"],
        ["v1=x"],
        ["v1=-1"],
        ["v1=nan"],
        ["v1=inf"],
        ["v1=1", "v1=2"],
        ["a b=1"],
        ["v1=0"],
    ],
)
def test_bad_weights_are_refused(given: list[str]) -> None:
    with pytest.raises(ConfigError):
        parse_revision_weights(given)
    assert parse_revision_weights(["v1=0", "v2=0.5"]) == {"v1": 0.0, "v2": 0.5}


def test_whatever_happens_no_plan_has_workers_of_two_revisions() -> None:
    num_plans, num_kept, num_moved = (sum(num) for num in zip(*map(play, range(20)), strict=True))
    assert num_plans > 200
    assert num_kept > 20, "answers went on after a fault"
    assert num_moved > 5, "requests without a token went to another revision"


def play(seed: int) -> tuple[int, int, int]:
    """Workers come, go, fail and change revision; weights move; answers are in progress.

    Returns:
        Plans, those of them after a token, those of them at another revision than the last.
    """
    draw = random.Random(seed)
    router = Router(replans_max=20, requests_max=50, records_max=1000)
    alive: dict[str, WorkerInfo] = {}
    first_revision: dict[str, str] = {}
    parts: dict[str, list[tuple[WorkerInfo, Submit]]] = {}
    begun: set[str] = set()
    num_plans = num_kept = num_moved = 0

    def look() -> None:
        nonlocal num_plans, num_kept, num_moved
        seen: dict[tuple[str, int], set[str]] = {}
        for action in router.actions:
            if isinstance(action, ToWorker) and isinstance(action.message, Submit):
                submit = action.message
                who = alive[action.worker.worker_id]
                key = submit.key
                seen.setdefault((key.request_id, key.generation), set()).add(who.revision)
                parts.setdefault(key.request_id, []).append((who, submit))
                for peer in (submit.peer, submit.pull.owner if submit.pull else None):
                    if peer is not None:
                        assert alive[peer.incarnation.worker_id].revision == who.revision
                names: list[bytes] = []
                hasher_of(who)(names, submit.token_ids, b"")
                assert submit.hashes == tuple(names), "blocks are named as its worker does"
        for (request_id, _), revisions in seen.items():
            num_plans += 1
            (revision,) = revisions
            if request_id in begun:
                assert first_revision[request_id] == revision, "an answer never moves"
                num_kept += 1
            num_moved += first_revision.get(request_id, revision) != revision
            first_revision[request_id] = revision

    for step in range(150):
        router.now_ms += 1
        match draw.randrange(7):
            case 0 | 1:
                name, revision = f"w{draw.randrange(6)}", draw.choice(("v1", "v2"))
                if name not in alive:
                    alive[name] = worker(
                        name,
                        draw.choice(("prefill", "decode", "both")),
                        epoch=f"e{step}",
                        revision=revision,
                        contract=CONTRACT if revision == "v1" else NEW,
                    )
                    router.did(router.core.register(router.now_ms, alive[name]))
                    router.core.session_up(router.now_ms, alive[name].incarnation)
                    router.did(
                        router.core.from_worker(router.now_ms, alive[name].incarnation, STATS)
                    )
            case 2 if alive:
                gone = alive[draw.choice(sorted(alive))]
                router.lost(gone)
                look()
                del alive[gone.incarnation.worker_id]
                router.actions = []
            case 3 if router.core.ready:
                weights = {"v1": float(draw.randrange(3)), "v2": float(draw.randrange(3))}
                able = {info.revision for info in alive.values()}
                if any(weights[name] for name in able):
                    router.core.set_revision_weights(weights)
            case 4 if router.core.ready:
                router.generate(request(f"r{step}", num_tokens=draw.randrange(1, 30)))
            case 5 | 6 if parts:
                request_id = draw.choice(sorted(parts))
                who, submit = parts[request_id][-1]
                if who.incarnation.worker_id in alive:
                    position = len(submit.token_ids)
                    if draw.random() < 0.5:
                        router.tokens(who, submit, position, 7)
                        if router.delivered:
                            begun.add(request_id)
                    else:
                        router.ended(who, submit, EndReason.CAPACITY)
        look()
        router.actions = []
    return num_plans, num_kept, num_moved
