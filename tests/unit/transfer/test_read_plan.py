"""Parts of blocks between unequal workers: beside copying everything through the whole tensor."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.errors import ConfigError
from disagg.messages.forms import GroupForm, Section
from disagg.transfer.read_plan import BlockRange, GroupReads, ReadPlan, plan_reads
from tests.unit.transfer.forms import Case, Side, Units, cases, spread

NUM_CELLS = 3
Memory = list[list[bytearray]]


def planned(case: Case) -> ReadPlan:
    """The plan of a case; of equal workers too, as if they were not."""
    reader = replace(case.reader.contract, block_bytes=0)  # equal blocks are read whole
    plan = plan_reads(case.owner.contract, reader)
    assert plan is not None
    return plan


def canonical(case: Case, rng: random.Random, reads: GroupReads) -> Units:
    """Random KV of all cells' tokens. Where tokens are packed, of their blocks."""
    form = case.owner.form
    cell_tokens = 1 if form.is_state else reads.src_blocks * form.block_tokens
    return {
        (layer, tensor.name, head, token): bytes(rng.choices(range(1, 256), k=tensor.unit_bytes))
        for layer in form.layers
        for tensor in case.tensors
        for head in range(tensor.num_heads)
        for token in range(NUM_CELLS * cell_tokens)
        if form.is_state or tensor.by_token or token % form.block_tokens == 0
    }


def carried_out(reads: list[BlockRange], owner: Memory, reader: Memory) -> None:
    for one in reads:
        source = owner[one.src_rank][one.src_block]
        part = source[one.src_offset : one.src_offset + one.num_bytes]
        assert len(part) == one.num_bytes > 0
        target = reader[one.dst_rank][one.dst_block]
        target[one.dst_offset : one.dst_offset + one.num_bytes] = part
        assert len(target) == len(reader[0][0])


def blank(side: Side, num_blocks: int) -> Memory:
    return [
        [bytearray(side.form.useful_bytes) for _ in range(num_blocks)]
        for _ in range(side.num_ranks)
    ]


def cells_of(
    plan: GroupReads, owned: list[int], own: list[int]
) -> list[tuple[list[int], list[int]]]:
    src, dst = plan.src_blocks, plan.dst_blocks
    return [
        (owned[n * src : (n + 1) * src], own[n * dst : (n + 1) * dst]) for n in range(NUM_CELLS)
    ]


@given(case=cases(), seed=st.integers(0, 1 << 30))
def test_equals_copying_through_the_whole_tensor(case: Case, seed: int) -> None:
    """Whatever is unequal, and wherever the blocks lie in both pools."""
    rng = random.Random(seed)
    plan = planned(case)
    (group,) = plan.groups
    units = canonical(case, rng, group)
    held = spread(case.owner, units, NUM_CELLS, group.src_blocks)
    wanted = spread(case.reader, units, NUM_CELLS, group.dst_blocks)
    owned = rng.sample(range(NUM_CELLS * group.src_blocks), NUM_CELLS * group.src_blocks)
    own = rng.sample(range(NUM_CELLS * group.dst_blocks), NUM_CELLS * group.dst_blocks)
    owner, reader = blank(case.owner, len(owned)), blank(case.reader, len(own))
    for place, block in enumerate(owned):
        for rank in range(case.owner.num_ranks):
            owner[rank][block] = held[rank][place]
    carried_out(plan.reads(0, cells_of(group, owned, own)), owner, reader)
    for place, block in enumerate(own):
        for rank in range(case.reader.num_ranks):
            assert reader[rank][block] == wanted[rank][place]


@given(case=cases(), seed=st.integers(0, 1 << 30))
def test_control_without_any_one_range_it_differs(case: Case, seed: int) -> None:
    rng = random.Random(seed)
    plan = planned(case)
    (group,) = plan.groups
    units = canonical(case, rng, group)
    owner = spread(case.owner, units, NUM_CELLS, group.src_blocks)
    wanted = spread(case.reader, units, NUM_CELLS, group.dst_blocks)
    owned, own = list(range(len(owner[0]))), list(range(len(wanted[0])))
    reads = plan.reads(0, cells_of(group, owned, own))
    reads.remove(rng.choice(reads))
    reader = blank(case.reader, len(own))
    carried_out(reads, owner, reader)
    assert reader != wanted


@given(case=cases(), seed=st.integers(0, 1 << 30))
def test_only_what_both_sides_name_moves(case: Case, seed: int) -> None:
    """A block that is not offered is not read, and one that is not lacked is not written."""
    rng = random.Random(seed)
    plan = planned(case)
    (group,) = plan.groups
    owners = [rng.choice([None, n]) for n in range(group.src_blocks)]
    readers = [rng.choice([None, n]) for n in range(group.dst_blocks)]
    for one in plan.reads(0, [(owners, readers)]):
        assert owners[one.src_block] is not None
        assert readers[one.dst_block] is not None
    assert plan.reads(0, [([None] * group.src_blocks, readers)]) == []


@given(case=cases())
def test_the_fewest_ranges(case: Case) -> None:
    """No two ranges of one pair of blocks are neighbours on both sides; none overlap."""
    (group,) = planned(case).groups
    for ranges in group.ranges.values():
        ends = {
            (r.src_rank, r.src_offset + r.num_bytes, r.dst_rank, r.dst_offset + r.num_bytes)
            for r in ranges
        }
        starts = {(r.src_rank, r.src_offset, r.dst_rank, r.dst_offset) for r in ranges}
        assert ends.isdisjoint(starts)
    for to in range(group.dst_blocks):
        written = [
            (r.dst_rank, byte)
            for (_, dst), ranges in group.ranges.items()
            if dst == to
            for r in ranges
            for byte in range(r.dst_offset, r.dst_offset + r.num_bytes)
        ]
        assert len(written) == len(set(written))


@given(case=cases(), data=st.data())
def test_what_cannot_be_planned_is_refused_by_name(case: Case, data: st.DataObject) -> None:
    """One thing at a time is wrong with the reader: both values are in the message."""
    form = case.reader.form
    section = form.sections[0]
    broken, named = data.draw(
        st.sampled_from(
            [
                (replace(form, kind="other"), "kind"),
                (replace(form, window_tokens=6), "window_tokens 6 != 5"),
                (replace(form, layers=(*form.layers, 77)), "layers"),
                (replace(form, block_tokens=case.owner.form.block_tokens * 2 + 1), "block_tokens"),
                (replace(form, block_tokens=0), "block_tokens"),
                (replace(form, sections=()), "sections"),
                (replace(form, sections=(replace(section, name="x"),)), "sections"),
                (
                    replace(
                        form,
                        sections=(
                            replace(section, unit_bytes=section.unit_bytes + 1),
                            *form.sections[1:],
                        ),
                    ),
                    "unit_bytes",
                ),
                (replace(form, page_bytes=section.offset), "ends after its page"),
                (replace(form, useful_bytes=0), "bytes in"),
            ]
        )
    )
    if named == "block_tokens" and case.owner.form.block_tokens == 1:
        broken = replace(broken, block_tokens=0)  # 1 divides everything else
    reader = Side(broken, case.reader.num_ranks)
    with pytest.raises(ConfigError, match=named) as refused:
        plan_reads(case.owner.contract, reader.contract)
    assert refused.value.param == "contract"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "bfloat16"),
        ("page_format", "other"),
        ("model_fingerprint", "x"),
        ("hash_block_tokens", 2),
        ("hash_scheme", "x"),
    ],
)
def test_equal_blocks_of_unequal_contents_are_refused(field: str, value: object) -> None:
    owner = Side(_PLAIN, 1).contract
    reader = replace(owner, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{field}: {value!r} != "):
        plan_reads(owner, reader)


def test_equal_workers_read_whole_blocks() -> None:
    owner = Side(_PLAIN, 2).contract
    assert plan_reads(owner, owner) is None
    assert plan_reads(replace(owner, forms=()), replace(owner, forms=())) is None


def test_ranks_that_share_no_heads_evenly_are_refused() -> None:
    owner, reader = Side(_PLAIN, 2).contract, Side(_PLAIN, 1).contract
    with pytest.raises(ConfigError, match="2 heads over 1 ranks, 1 on each"):
        plan_reads(owner, replace(reader, block_bytes=0))


def test_the_ranges_of_two_ranks_into_one() -> None:
    """By hand: K of two heads, then V; two tokens of 3 bytes; heads lie apart on the owner."""
    owner, reader = Side(_PLAIN, 2), Side(_WHOLE, 1)
    plan = plan_reads(owner.contract, reader.contract)
    assert plan is not None
    assert plan.reads(0, [([7], [9])]) == [
        BlockRange(0, 7, 0, 0, 9, 0, 6),
        BlockRange(0, 7, 6, 0, 9, 12, 6),
        BlockRange(1, 7, 0, 0, 9, 6, 6),
        BlockRange(1, 7, 6, 0, 9, 18, 6),
    ]


def _made(num_ranks: int) -> Side:
    heads = 2 // num_ranks
    sections = tuple(
        Section(name, number * heads * 6, 2, heads, 6, 3, 3)
        for number, name in enumerate(("keys", "values"))
    )
    size = 2 * heads * 6
    return Side(GroupForm("pages", 2, 0, False, (0,), size, 1, size, sections), num_ranks)


_PLAIN, _WHOLE = _made(2).form, _made(1).form
