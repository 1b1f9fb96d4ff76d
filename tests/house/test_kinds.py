"""A kind of KV group is one file and one entry in the registry: shown by adding one."""

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from disagg.errors import ConfigError, InvariantViolation
from disagg.kv.blocks.block_pool import NULL_BLOCK
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.event_publishing import VllmEventShape
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.registry import KINDS
from disagg.kv.sequence import KVSequence
from disagg.kv.shapes.layout import plan_layout
from disagg.kv.shapes.memory_plan import all_layers_full, plan_memory
from disagg.messages.identity import Incarnation
from disagg.messages.registration import GroupInfo
from disagg.routing.index import PrefixIndex
from tests.house.look_back import LookBackManager, LookBackSpec
from tests.unit.scheduling.failure_worlds import outcomes, play, two_turns

ROOT = Path(__file__).parents[2]
HASHER = BlockHasher(b"house", 4)
NEW = LookBackSpec(4, 2, 4, 2, 8)
SPECS: list[Spec] = [NEW, FullAttentionSpec(4, 2, 4, 2)]


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, LookBackSpec.kind, LookBackSpec)


def request(key: str, num_tokens: int = 32) -> KVSequence:
    made = KVSequence(key, list(range(num_tokens)))
    HASHER.extend(made.hashes, made.token_ids)
    return made


def coordinator() -> KVCacheCoordinator:
    return KVCacheCoordinator(
        plan_layout(SPECS), 64, max_model_tokens=64, max_step_tokens=8, events_with_tokens=True
    )


def compute(kv: KVCacheCoordinator, key: str) -> KVSequence:
    """Compute a prompt of 32 tokens in steps of 8."""
    made = request(key)
    assert kv.admit(key, 32)
    for done in range(8, 33, 8):
        assert kv.allocate(made, num_new_tokens=8)
        kv.publish(key, done)
        kv.release_out_of_window(key, done)
        kv.check()
    return made


def test_allocate_match_and_free() -> None:
    kv = coordinator()
    compute(kv, "r")
    assert kv.tables.num_held("r") == (2, 8), "at 32 a chunk begins: the chunk before it is seen"
    hit = kv.find_longest_cache_hit(request("s", 33), 32)
    assert hit.num_tokens == 32
    assert [block != NULL_BLOCK for block in hit.block_ids[0]] == [False] * 6 + [True] * 2
    kv.free("r")
    kv.check()
    assert kv.num_free_blocks == kv.num_usable_blocks


def test_transfer_reservation() -> None:
    kv = coordinator()
    reserved = kv.reserve_external(request("r", 30), 30)
    assert reserved is not None
    assert [block_index for block_index, _ in reserved.lacks[0]] == [4, 5, 6, 7]
    kv.commit_external("r")
    kv.free("r")
    kv.check()
    assert kv.num_free_blocks == kv.num_usable_blocks


def test_events_and_the_routers_rule() -> None:
    kv = coordinator()
    compute(kv, "r")
    batch = kv.events.since(0)
    assert batch is not None
    _, wire, _ = VllmEventShape(kv.layout.groups).batch(0.0, batch.events)
    assert isinstance(wire, list)
    assert {(e["kv_cache_spec_kind"], e.get("kv_cache_spec_look_back")) for e in wire} == {
        ("look_back_attention", 8),
        ("full_attention", None),
    }
    groups = [
        GroupInfo(g.spec.kind, g.spec.block_tokens, g.spec.window_tokens, 1, 64)
        for g in kv.layout.groups
    ]
    index = PrefixIndex(groups, 4)
    worker = Incarnation("w", "1")
    index.add(worker, 100)
    assert index.apply(worker, 0, None, batch.events)
    for end in range(1, 34):
        found = index.match(end, request("s").hashes[: end // 4])[worker].usable_tokens
        assert found == kv.find_longest_cache_hit(request("s", end), end - 1).num_tokens
    with pytest.raises(ConfigError, match="whole blocks"):
        PrefixIndex([replace(groups[0], window_tokens=6)], 4)


def test_memory_plan() -> None:
    plan = plan_memory(SPECS, 1 << 20, 64)
    assert [(group.kind, group.window_tokens) for group in plan.groups] == [
        ("look_back", 8),
        ("full_attention", 0),
    ]
    # Two chunks and the token that is computed: 17 tokens in blocks of 4.
    assert [group.blocks_per_sequence for group in plan.groups] == [5, 16]
    full = plan_memory(all_layers_full(SPECS), 1 << 20, 64)
    assert plan.num_sequences > full.num_sequences


def test_hand_over_and_prefix_pull_in_the_simulator() -> None:
    world = play(two_turns(plan_layout(SPECS)))
    assert outcomes(world) == ["finished", "finished"]
    assert (world.num_pulls, world.num_handovers) == (1, 2)


def test_control_a_kind_that_drops_what_it_still_sees_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = LookBackManager.skipped_tokens
    monkeypatch.setattr(LookBackManager, "skipped_tokens", lambda *a: right(*a) + 8)
    with pytest.raises(InvariantViolation, match="is null"):
        play(two_turns(plan_layout(SPECS)))


# -- nobody else tells kinds apart -------------------------------------------------------------


def find_kinds_told_apart(root: Path) -> Iterator[str]:
    """Places outside ``kv/kinds`` that ask which kind a spec or manager is."""
    for folder in ("disagg", "workers", "router"):
        for path in sorted((root / folder).rglob("*.py")):
            if "kv/kinds/" in path.as_posix():
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                asked: list[ast.expr] = []
                if isinstance(node, ast.MatchClass):
                    asked = [node.cls]
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    asked = node.args[1:] if node.func.id in ("isinstance", "issubclass") else []
                elif isinstance(node, ast.Compare):
                    asked = [node.left, *node.comparators]
                names = [n.id for one in asked for n in ast.walk(one) if isinstance(n, ast.Name)]
                if any(name.endswith(("Spec", "Manager")) for name in names):
                    yield f"{path.relative_to(root)}:{node.lineno}"  # type: ignore[attr-defined]


def test_nobody_else_tells_kinds_apart() -> None:
    assert list(find_kinds_told_apart(ROOT)) == []


@pytest.mark.parametrize(
    "planted",
    [
        "isinstance(spec, FullAttentionSpec | MLASpec)",
        "match spec:\n    case LinearStateSpec():\n        pass",
        "type(spec) is SlidingWindowSpec",
        "isinstance(manager, SlidingWindowManager)",
    ],
)
def test_control_one_who_does_is_found(tmp_path: Path, planted: str) -> None:
    (tmp_path / "disagg").mkdir()
    (tmp_path / "disagg" / "layout.py").write_text(planted)
    assert len(list(find_kinds_told_apart(tmp_path))) == 1
