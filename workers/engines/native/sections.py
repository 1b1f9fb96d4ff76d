"""The tensors of a page, as contracts say it: what `PagedPool` and `StateMixers` make of it."""

from disagg.kv.kinds.kind import keeps_states
from disagg.kv.shapes.layout import KVCacheGroup
from disagg.messages.forms import Section
from disagg.workers.engines.forms import whole_page
from disagg.workers.engines.native.paged_pool import pages_of


def sections_of(group: KVCacheGroup) -> tuple[Section, ...]:
    """K of all heads, then V of all heads, or latents; a state as a whole."""
    if keeps_states(group.spec):
        return whole_page(group, 1)
    pages = pages_of(group.spec)
    token = pages.head_size * pages.dtype_bytes
    head = pages.block_tokens * token
    heads = pages.num_kv_heads
    names = ("keys", "values") if pages.has_values else ("latents",)
    return tuple(
        Section(name, number * heads * head, heads, heads, head, token, token)
        for number, name in enumerate(names)
    )
