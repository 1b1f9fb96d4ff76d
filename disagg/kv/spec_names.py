"""Names of the spec kinds outside the coordinator: wire, reports, routing."""

from typing import assert_never

from disagg.kv.specs import (
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    LinearStateSpec,
    MLASpec,
    SlidingWindowSpec,
    Spec,
)


def spec_kind(spec: Spec) -> str:
    """The kind's name, as routers and reports show it."""
    match spec:
        case FullAttentionSpec():
            return "full_attention"
        case MLASpec():
            return "mla"
        case SlidingWindowSpec():
            return "sliding_window"
        case ChunkedLocalSpec():
            return "chunked_local"
        case LinearStateSpec():
            return "linear_state"
        case CrossAttentionSpec():
            return "cross_attention"
    assert_never(spec)


def vllm_spec_kind(spec: Spec) -> str:
    """The kind's name in vLLM's KV events (``KVCacheSpecKind`` of 0.33.0)."""
    match spec:
        case FullAttentionSpec():
            return "full_attention"
        case MLASpec():
            return "mla_attention"
        case SlidingWindowSpec():
            return "sliding_window"
        case ChunkedLocalSpec():
            return "chunked_local_attention"
        case LinearStateSpec():
            return "mamba"
        case CrossAttentionSpec():
            return "cross_attention"
    assert_never(spec)


def window_tokens_of(spec: Spec) -> int:
    """Window or chunk in tokens; 0 where the kind has none."""
    match spec:
        case SlidingWindowSpec():
            return spec.window_tokens
        case ChunkedLocalSpec():
            return spec.chunk_tokens
        case FullAttentionSpec() | MLASpec() | LinearStateSpec() | CrossAttentionSpec():
            return 0
    assert_never(spec)
