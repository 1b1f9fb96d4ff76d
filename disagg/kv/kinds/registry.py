"""All kinds of KV cache groups by name; a new one is a file beside this and a line here."""

from disagg.kv.kinds.chunked_local import ChunkedLocalSpec
from disagg.kv.kinds.cross_attention import CrossAttentionSpec
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.kinds.mla import MLASpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.messages.registration import GroupInfo

_FAR = 1 << 30
"""Blocks past every window."""

_ALL: tuple[type[Spec], ...] = (
    FullAttentionSpec,
    MLASpec,
    SlidingWindowSpec,
    ChunkedLocalSpec,
    LinearStateSpec,
    CrossAttentionSpec,
)

KINDS: dict[str, type[Spec]] = {kind.kind: kind for kind in _ALL}


def sees_everything(group: GroupInfo) -> bool:
    """Whether a query needs all blocks before it, however many there are."""
    return KINDS[group.kind].first_needed(group, _FAR) == 0
