"""All kinds of KV cache groups by name; a new one is a file beside this and a line here."""

from disagg.kv.kinds.chunked_local import ChunkedLocalSpec
from disagg.kv.kinds.cross_attention import CrossAttentionSpec
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.kinds.mla import MLASpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec

_ALL: tuple[type[Spec], ...] = (
    FullAttentionSpec,
    MLASpec,
    SlidingWindowSpec,
    ChunkedLocalSpec,
    LinearStateSpec,
    CrossAttentionSpec,
)

KINDS: dict[str, type[Spec]] = {kind.kind: kind for kind in _ALL}
