"""Our layout as vLLM's: specs of its layers, and where their pages lie in the one pool."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from vllm.v1 import kv_cache_interface as theirs

from disagg.errors import ConfigError
from disagg.kv.kinds.chunked_local import ChunkedLocalSpec
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec, keeps_states
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.kinds.mla import MLASpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.shapes.layout import KVCacheGroup, KVCacheLayout
from disagg.messages.forms import Section
from disagg.workers.engines.forms import whole_page
from disagg.workers.engines.vllm.devices import TAKES_STRIDES


def spec_of(layer: str, spec: Any, block_tokens: int) -> Spec:
    """What a layer of vLLM keeps, as ours.

    Args:
        layer: its name, for refusals.
        spec: vLLM's.
        block_tokens: of every block. vLLM's states have none: it keeps one per request.

    Raises:
        ConfigError: a kind that has no counterpart here, or pages of another size.
    """
    shape = {
        "block_tokens": block_tokens,
        "num_kv_heads": getattr(spec, "num_kv_heads", 0),
        "head_size": getattr(spec, "head_size", 0),
        "dtype_bytes": spec.dtype.itemsize if hasattr(spec, "dtype") else 0,
    }
    made: Spec | None = None
    # By the exact type: a derived one keeps something else.
    if type(spec) is theirs.FullAttentionSpec:
        made = FullAttentionSpec(**shape)
    elif type(spec) is theirs.SlidingWindowSpec:
        made = SlidingWindowSpec(**shape, window_tokens=spec.sliding_window)
    elif type(spec) is theirs.ChunkedLocalAttentionSpec:
        made = ChunkedLocalSpec(**shape, chunk_tokens=spec.attention_chunk_size)
    elif type(spec) is theirs.MLAAttentionSpec:
        made = MLASpec(**shape)
    elif type(spec) is theirs.MambaSpec and not spec.num_speculative_blocks:
        # All tensors of the state, one after the other.
        made = LinearStateSpec(block_tokens, spec.state_content_size_bytes)
    if made is None or made.page_bytes != spec.page_size_bytes:
        raise ConfigError(
            f"vLLM keeps {type(spec).__name__} of {spec.page_size_bytes} bytes a block for"
            f" {layer}, which has no counterpart here",
            param="model",
        )
    return made


class RankHeads(NamedTuple):
    """Ranks of a worker, and KV heads of the model as a whole."""

    num_ranks: int
    num_kv_heads: int


BLOCK_MAJOR, LAYER_MAJOR = "BL", "LB"
"""Begin the names of the forms: all layers of a block lie together, or all blocks of a layer."""


def choose_form(
    layout: KVCacheLayout, forms: Sequence[str], backends: Collection[str], whole_blocks: bool
) -> tuple[str, int]:
    """How the pool lies: vLLM's name of the form, and in how many parts a block lies.

    All layers of a block lie together where the kernels let it be so, else one layer of a group
    lies apart from the next.

    Args:
        layout: of the pool.
        forms: that all kernels take, the best first: orders in which layers, blocks, heads and
            tokens lie.
        backends: of the layers that keep tokens; kernels of states take any stride.
        whole_blocks: the kernels' blocks are as large as ours; where they are smaller, those of one
            of ours have to lie one after the other.

    Raises:
        ConfigError: the layers' pages have several sizes, so that no block could serve any group.
    """
    together = next((form for form in forms if form.startswith(BLOCK_MAJOR)), "")
    if whole_blocks and together:
        return together, 1
    form = next((form for form in forms if form.startswith(LAYER_MAJOR)), "")
    if whole_blocks and TAKES_STRIDES.issuperset(backends):
        return form, 1
    sizes = sorted({group.spec.page_bytes for group in layout.groups})
    if len(sizes) > 1 or not form:
        raise ConfigError(
            f"vLLM's {', '.join(sorted(backends))} takes each layer's blocks as one piece of memory"
            f" only, and the model's layers keep pages of {', '.join(map(str, sizes))} bytes",
            param="model",
        )
    return form, layout.block_bytes // sizes[0]


def sections_of(
    group: KVCacheGroup, form: str, num_parts: int, backends: Collection[str], heads: RankHeads
) -> tuple[Section, ...]:
    """The tensors of a layer's page in one rank, for workers of other numbers of ranks.

    CPU_ATTN has one head after the other, and packs the tokens of a block in each as its
    instruction set wants them: heads can be taken apart, tokens cannot. What other kernels do was
    not looked at, and which part of a state is which head's is the model's business: such pages
    are read as a whole, by as many ranks.

    Args:
        group: of the rank's layout.
        form: see `choose_form`.
        num_parts: of a block.
        backends: of the group's layers; of states none.
        heads: how ranks share those of the model.
    """
    if num_parts > 1:
        return ()
    spec = group.spec
    if keeps_states(spec):
        return whole_page(group, heads.num_ranks)
    here = getattr(spec, "num_kv_heads", 0)
    total = here * heads.num_ranks
    # One head in each of several ranks may be the same one.
    known = here > 1 or heads.num_ranks == 1 or total == heads.num_kv_heads
    if set(backends) != {"CPU_ATTN"} or not form.endswith("HNC") or not here or not known:
        return ()
    head_bytes = spec.page_bytes // here
    return (Section("heads", 0, total, here, head_bytes, 0, head_bytes),)


def kv_cache_config(
    layout: KVCacheLayout, specs: Mapping[str, Any], num_blocks: int, num_parts: int
) -> theirs.KVCacheConfig:
    """VLLM's description of a pool with our layout.

    The pool is [num_blocks, block_bytes], or where a block lies in several parts, one per layer
    of a group, [num_parts, num_blocks, page_bytes].

    Args:
        layout: planned from ``specs`` in their order.
        specs: vLLM's own, by layer name.
        num_blocks: of the pool.
        num_parts: of a block.
    """
    names = list(specs)
    apart = num_parts > 1
    return theirs.KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[
            theirs.KVCacheTensor(
                size=num_blocks * layout.block_bytes,
                layers=[names[layer] for layer in group.layers],
                layer_stride=group.spec.page_bytes * (num_blocks if apart else 1),
                block_stride=group.spec.page_bytes if apart else layout.block_bytes,
            )
            for group in layout.groups
        ],
        kv_cache_groups=[
            theirs.KVCacheGroupSpec(
                [names[layer] for layer in group.layers], specs[names[group.layers[0]]]
            )
            for group in layout.groups
        ],
    )
