"""How many tokens a KV block has: those given, if the engine takes them, or what it needs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from disagg.errors import ConfigError
from disagg.kv.shapes.layout import KVCacheLayout
from disagg.workers.options import Auto

DEFAULT = 16
"""The native engine takes any number; vLLM's kernels on GPUs take multiples of this one."""
SIZES: Sequence[int] = (DEFAULT, 32, 64, 128, 256)
"""Tried in turn where kernels decide."""
VLLM_TAKES: Mapping[str, int] = {"cpu": 32, "cuda": DEFAULT}
"""Multiples of it, by device; a worker asks the kernels themselves, which on a GPU depend on it."""


def hashed_layout(layout: KVCacheLayout, given: int | Auto) -> KVCacheLayout:
    """The layout with the hash blocks of the fleet; auto: its smallest block.

    Args:
        layout: of an engine.
        given: ``worker.hash_block_tokens``.

    Raises:
        ConfigError: it does not divide every block size.
    """
    if not isinstance(given, int):
        return layout
    sizes = sorted({group.spec.block_tokens for group in layout.groups})
    if any(size % given for size in sizes):
        blocks = " and ".join(map(str, sizes))
        raise ConfigError(
            f"worker.hash_block_tokens: {given} does not divide blocks of {blocks} tokens",
            param="worker.hash_block_tokens",
        )
    return replace(layout, hash_block_tokens=given)


def fitting_block_tokens(
    given: int | Auto, fits: Callable[[int], bool], who: str, takes: str
) -> int:
    """The given number, or the least of ``SIZES`` that fits.

    Args:
        given: ``worker.block_tokens``.
        fits: whether the kernels take blocks of so many tokens.
        who: the kernels, for the error.
        takes: what they take, for the error.

    Raises:
        ConfigError: the given one does not fit, with the one that would; or none does.
    """
    least = next((size for size in SIZES if fits(size)), None)
    chosen = given if isinstance(given, int) else least
    if chosen is not None and fits(chosen):
        return chosen
    advice = f"; {least} would do, which auto chooses" if least is not None else ""
    raise ConfigError(
        f"worker.block_tokens: {who} takes {takes}, not {given}{advice}",
        param="worker.block_tokens",
    )


def planned_block_tokens(engine: str, device: str, given: int | Auto) -> int:
    """What a worker of an engine will take on a device; vLLM need not be installed.

    Raises:
        ConfigError: see `fitting_block_tokens`.
    """
    multiple = VLLM_TAKES[device] if engine == "vllm" else 1
    return fitting_block_tokens(
        given,
        lambda tokens: tokens % multiple == 0,
        f"the {engine} engine on {device}",
        f"multiples of {multiple}",
    )
