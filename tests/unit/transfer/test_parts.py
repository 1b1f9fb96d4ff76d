"""What of an owner's blocks goes where in a reader's table, block sizes unequal."""

import pytest

from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.kinds.chunked_local import ChunkedLocalSpec
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec, keeps_states
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.sequence import KVSequence
from disagg.kv.shapes.layout import KVCacheGroup, KVCacheLayout
from disagg.kv.transfer_plan import first_blocks, first_lacked, moved_blocks
from disagg.messages.forms import GroupForm, Section
from disagg.messages.registration import Contract
from disagg.transfer.read_plan import ReadPlan, plan_reads
from disagg.transfer.reader.parts import Parts, parts_of

HASH_TOKENS, NUM_BLOCKS, UNIT = 2, 200, 12
STATE_BYTES = 24
KINDS = ("full", "window", "chunk", "state")


def spec(kind: str, tokens: int) -> Spec:
    by_name: dict[str, Spec] = {
        "full": FullAttentionSpec(tokens, 1, 1, 1),
        "window": SlidingWindowSpec(tokens, 1, 1, 1, 11),
        "chunk": ChunkedLocalSpec(tokens, 1, 1, 1, 12),
        "state": LinearStateSpec(tokens, STATE_BYTES),
    }
    return by_name[kind]


class Side:
    """A worker with one group, whose states take fewer blocks where those are larger."""

    def __init__(self, kind: str, tokens: int) -> None:
        self.spec = spec(kind, tokens)
        self.is_state = keeps_states(self.spec)
        self.blocks = -(-STATE_BYTES // (tokens * 2)) if self.is_state else 1
        group = KVCacheGroup(0, self.spec, (0,), self.blocks)
        self.layout = KVCacheLayout((group,), max(tokens * 2, UNIT), HASH_TOKENS)
        self.kv = KVCacheCoordinator(
            self.layout, NUM_BLOCKS, max_model_tokens=200, max_step_tokens=200
        )

    @property
    def contract(self) -> Contract:
        tokens, size = self.spec.block_tokens, self.spec.page_bytes
        section = (
            Section("state", 0, 1, 1, size, 0, size)
            if self.is_state
            else Section("keys", 0, 1, 1, tokens, 1, 1)
        )
        form = GroupForm(
            self.spec.kind,
            tokens,
            self.spec.window_tokens,
            self.is_state,
            (0,),
            size,
            self.blocks,
            self.layout.useful_bytes(0),
            (section,),
        )
        return Contract("m", "d", (str(tokens),), "p", size, 2, "h", 1, 1, forms=(form,))


def sequence() -> KVSequence:
    return KVSequence("request", [0] * 64, [bytes([n]) * 32 for n in range(32)])


def planned(owner: Side, reader: Side, num_tokens: int) -> tuple[ReadPlan, Parts, dict[int, int]]:
    """A hand-over of a prompt: the plan, the reader's parts, and what the owner offers."""
    plan = plan_reads(owner.contract, reader.contract)
    assert plan is not None
    reservation = reader.kv.reserve_external(sequence(), num_tokens)
    assert reservation is not None
    lacked = first_lacked(reader.kv.managers, "request", reservation.lacks)
    assert owner.kv.allocate(sequence(), num_new_tokens=num_tokens)
    first = first_blocks(owner.kv.managers, lacked)
    (offered,) = moved_blocks(owner.kv.managers, "request", num_tokens, first)
    parts = parts_of(plan, reader.kv.managers, num_tokens, reservation.lacks, lacked)
    return plan, parts, dict(offered)


@pytest.mark.parametrize(("theirs", "ours"), [(2, 4), (4, 2), (2, 8), (8, 2), (4, 8)])
@pytest.mark.parametrize("kind", KINDS)
def test_all_that_is_offered_is_known_and_all_that_is_seen_arrives(
    kind: str, theirs: int, ours: int
) -> None:
    for num_tokens in range(1, 50):
        owner, reader = Side(kind, theirs), Side(kind, ours)
        plan, parts, offered = planned(owner, reader, num_tokens)
        (group,), (by_block,), (surplus,) = plan.groups, parts.by_block, parts.surplus
        assert set(offered) == by_block.keys() | surplus
        assert by_block.keys().isdisjoint(surplus)
        table = reader.kv.tables.blocks("request")[0]
        bytes_read = set()
        for at, reads in by_block.items():
            for part in reads:
                assert table[part.block_index] == part.block
                for one in group.ranges[group.pairs[part.pair]]:
                    for byte in range(one.num_bytes):
                        theirs_is = at, one.src_offset + byte
                        ours_is = part.block_index, one.dst_offset + byte
                        if not reader.is_state:  # a byte is a token
                            assert place(theirs_is, theirs) == place(ours_is, ours)
                        else:
                            assert state_byte(theirs_is, owner) == state_byte(ours_is, reader)
                        bytes_read.add(place(ours_is, ours) if not reader.is_state else ours_is)
        if reader.is_state:
            assert len(bytes_read) == STATE_BYTES
        else:
            first = reader.spec.first_seen(num_tokens)
            assert first is not None
            assert bytes_read >= set(range(first, num_tokens)) or first >= num_tokens
            withheld = parts.unfilled[0]
            for index in range(withheld, num_tokens // ours):  # what is published is whole
                if table[index]:
                    assert bytes_read >= set(range(index * ours, (index + 1) * ours))


def place(at: tuple[int, int], block_tokens: int) -> int:
    return at[0] * block_tokens + at[1]


def state_byte(at: tuple[int, int], side: Side) -> int:
    """Byte of the state, from its first block on."""
    return at[0] % side.blocks * side.layout.useful_bytes(0) + at[1]


def test_states_take_other_numbers_of_blocks() -> None:
    assert [Side("state", tokens).blocks for tokens in (2, 4, 8)] == [6, 3, 2]


def test_only_a_windows_first_block_is_withheld() -> None:
    """At 20, a window of 11 is seen from 10 on: small blocks begin there, large ones at 8."""
    _, parts, _ = planned(Side("window", 2), Side("window", 4), 20)
    assert parts.unfilled == (3,)
    _, parts, _ = planned(Side("window", 4), Side("window", 2), 20)
    assert parts.unfilled == (0,)
