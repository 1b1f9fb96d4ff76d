"""Workers with other blocks: paired where parts can be read, else refused field by field."""

import re
from dataclasses import replace
from typing import Any

import pytest

from disagg.errors import ConfigError
from disagg.messages.forms import GroupForm, Section
from disagg.messages.registration import Contract, GroupInfo
from tests.unit.routing.builders import CONTRACT, FULL, WINDOW, Router, worker

PROMPT = tuple(range(100, 141))


def unlike(block_tokens: int, num_ranks: int = 1, **changes: Any) -> Contract:
    """Of a worker with other blocks of the same pages: two heads of one byte a token."""
    heads = 2 // num_ranks
    section = Section("keys", 0, 2, heads, block_tokens, 1, 1)
    page_bytes = heads * block_tokens
    forms = tuple(
        GroupForm(
            group.kind,
            block_tokens,
            group.window_tokens,
            False,
            (number,),
            page_bytes,
            1,
            page_bytes,
            (replace(section, **changes),),
        )
        for number, group in enumerate((FULL, WINDOW))
    )
    groups = (f"full of {block_tokens}", f"window of {block_tokens}")
    return replace(
        CONTRACT, groups=groups, block_bytes=page_bytes, num_ranks=num_ranks, forms=forms
    )


def groups_of(block_tokens: int) -> tuple[GroupInfo, ...]:
    return tuple(replace(group, block_tokens=block_tokens) for group in (FULL, WINDOW))


@pytest.mark.parametrize(("block_tokens", "num_ranks"), [(4, 1), (8, 1), (4, 2), (16, 2)])
def test_workers_whose_blocks_can_be_read_in_parts_are_paired(
    block_tokens: int, num_ranks: int
) -> None:
    first = worker("p", "prefill", contract=unlike(4), groups=groups_of(4))
    contract, groups = unlike(block_tokens, num_ranks), groups_of(block_tokens)
    router = Router(first, worker("d", "decode", contract=contract, groups=groups))
    router.holds(first, PROMPT)  # the look-up goes by the hashes that both have
    router.generate()
    assert sorted(to for to, _ in router.submits) == ["d", "p"]


@pytest.mark.parametrize(
    ("contract", "named"),
    [
        (unlike(6), "block_tokens 6, 4: neither divides the other"),
        (unlike(8, num_heads=4), "section keys: num_heads 4 != 2"),
        (unlike(8, unit_bytes=2), "section keys: unit_bytes 2 != 1"),
        (unlike(8, token_stride=0), "section keys: token_stride 0 != 1"),
        (replace(unlike(4), num_ranks=3), "2 heads over 3 ranks, 2 on each"),
        (replace(unlike(4), num_ranks=3), "num_ranks: 3 != 1"),
        (replace(unlike(4), forms=()), "forms: 0 and 2 groups say"),
    ],
)
def test_other_blocks_are_refused_field_by_field(contract: Contract, named: str) -> None:
    router = Router(worker("p", "prefill", contract=unlike(4), groups=groups_of(4)))
    other = worker("d", "decode", contract=contract, groups=groups_of(8))
    with pytest.raises(ConfigError, match=re.escape(named)) as refused:
        router.core.register(0, other)
    assert "workers d and p cannot exchange KV" in refused.value.message
    assert len(router.core.fleet) == 1


PAGES = replace(CONTRACT, page_format="another")


@pytest.mark.parametrize(
    ("contract", "named"),
    [
        (PAGES, "page_format: 'another' != 'pages'"),
        (replace(CONTRACT, layout_version=2), "layout_version: 2 != 0"),
        (replace(CONTRACT, dtype="bfloat16"), "dtype: 'bfloat16' != 'float32'"),
    ],
)
def test_anything_else_is_refused_with_both_contracts(contract: Contract, named: str) -> None:
    router = Router(worker("p", "prefill"))
    with pytest.raises(ConfigError, match=re.escape(named)) as refused:
        router.core.register(0, worker("d", "decode", contract=contract))
    assert f"p: {CONTRACT}" in refused.value.message
    assert f"d: {contract}" in refused.value.message
    assert len(router.core.fleet) == 1
    router.join(worker("d", "decode"))  # control


def test_another_wire_version_is_refused_by_the_router_first() -> None:
    router = Router(worker("p", "prefill"))
    contract = replace(CONTRACT, wire_min=2, wire_max=3)
    with pytest.raises(ConfigError, match="speaks wire versions 2 to 3, this router 1 to 1"):
        router.core.register(0, worker("d", "decode", contract=contract))
    assert len(router.core.fleet) == 1


def test_unlike_workers_that_are_accepted_serve_alone_unless_their_types_differ() -> None:
    other = worker("d", "decode", contract=PAGES)
    router = Router(worker("p", "prefill"), other, accept_unlike_workers=True)
    router.generate()
    assert len({to for to, _ in router.submits}) == 1
    with pytest.raises(ConfigError, match="dtype"):
        router.core.register(0, worker("x", contract=replace(CONTRACT, dtype="bfloat16")))


def test_who_knows_a_living_workers_epoch_does_not_take_its_place() -> None:
    known = worker("p")
    router = Router(known)
    with pytest.raises(ConfigError, match="address cannot change") as refused:
        router.core.register(1, replace(known, address="elsewhere:1"))
    assert refused.value.param == "address"
    assert router.core.fleet[0].info == known
