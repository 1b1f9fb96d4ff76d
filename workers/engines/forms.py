"""How an engine's KV lies in its blocks, as its contract says it to workers unlike it."""

from collections.abc import Callable

from disagg.kv.kinds.kind import keeps_states
from disagg.kv.shapes.layout import KVCacheGroup, KVCacheLayout
from disagg.messages.forms import GroupForm, Section


def group_forms(
    layout: KVCacheLayout, sections_of: Callable[[KVCacheGroup], tuple[Section, ...]]
) -> tuple[GroupForm, ...]:
    """One form per group; its pages are as ``sections_of`` the group says.

    Args:
        layout: of a rank.
        sections_of: the tensors of a layer's page; none where the engine leaves it open, so that
            only equal workers exchange this group's KV.
    """
    return tuple(
        GroupForm(
            group.spec.kind,
            group.spec.block_tokens,
            group.spec.window_tokens,
            keeps_states(group.spec),
            group.layers,
            group.spec.page_bytes,
            group.blocks_per_state,
            layout.useful_bytes(group.group),
            sections_of(group),
        )
        for group in layout.groups
    )


def whole_page(group: KVCacheGroup, num_ranks: int) -> tuple[Section, ...]:
    """A page that only as many ranks can read: each has its own part of it, whatever is in it."""
    size = group.spec.page_bytes
    return (Section("page", 0, num_ranks, 1, size, 0, size),)
