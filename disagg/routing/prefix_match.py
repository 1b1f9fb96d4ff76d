"""Which workers hold everything that one KV cache group needs at each block boundary.

Workers are bits of an int, so one pass answers for the whole fleet.
"""

from collections.abc import Callable, Sequence

from disagg.errors import ConfigError
from disagg.messages.registration import GroupInfo

EVERYBODY = -1
"""The bit set of all workers."""


def check_group(group: GroupInfo, hash_block_tokens: int) -> None:
    """Refuse what could not be matched exactly.

    Raises:
        ConfigError: naming the field.
    """
    if group.kind not in _USABLE:
        raise ConfigError(
            f"unknown kind of KV cache group {group.kind!r}; known: {', '.join(sorted(_USABLE))}",
            param="groups.kind",
        )
    if hash_block_tokens < 1:
        raise ConfigError("hash_block_tokens must be positive", param="hash_block_tokens")
    if group.block_tokens < 1 or group.block_tokens % hash_block_tokens:
        raise ConfigError(
            f"block of {group.block_tokens} tokens is no multiple of the hash block "
            f"of {hash_block_tokens}",
            param="groups.block_tokens",
        )
    if group.kind in _WINDOWED and group.window_tokens < 1:
        raise ConfigError(f"a {group.kind} group needs a window", param="groups.window_tokens")


def usable_at(group: GroupInfo, holders: Sequence[int]) -> list[int]:
    """Bit sets of the workers that can go on after block ``i``, for every ``i``.

    Args:
        group: checked by `check_group`.
        holders: ``holders[i]`` is the bit set of workers that hold block ``i`` of the prompt.
    """
    return _USABLE[group.kind](group, holders)


def _all_before(group: GroupInfo, holders: Sequence[int]) -> list[int]:
    usable, run = [], EVERYBODY
    for mask in holders:
        run &= mask
        usable.append(run)
    return usable


def _window_before(group: GroupInfo, holders: Sequence[int]) -> list[int]:
    """The next token sees itself and ``window_tokens - 1`` before it.

    The AND over the last ``width`` sets costs two passes whatever the width: sets are ANDed from
    both ends inside segments of ``width``, and any window is a segment's tail and a head.
    """
    width = -(-(group.window_tokens - 1) // group.block_tokens)
    if width == 0:
        return [EVERYBODY] * len(holders)
    heads: list[int] = []
    tails = [EVERYBODY] * len(holders)
    for start in range(0, len(holders), width):
        end = min(start + width, len(holders))
        run = EVERYBODY
        for i in range(start, end):
            run &= holders[i]
            heads.append(run)
        run = EVERYBODY
        for i in range(end - 1, start - 1, -1):
            run &= holders[i]
            tails[i] = run
    return [head & tails[i - width + 1] if i >= width - 1 else head for i, head in enumerate(heads)]


def _chunk_before(group: GroupInfo, holders: Sequence[int]) -> list[int]:
    """Only the chunk that the next token stands in; at its start nothing is needed."""
    usable = []
    for i in range(len(holders)):
        end = (i + 1) * group.block_tokens
        start = end // group.window_tokens * group.window_tokens // group.block_tokens
        run = EVERYBODY
        for mask in holders[start : i + 1]:
            run &= mask
        usable.append(run)
    return usable


def _state_at(group: GroupInfo, holders: Sequence[int]) -> list[int]:
    return list(holders)


_USABLE: dict[str, Callable[[GroupInfo, Sequence[int]], list[int]]] = {
    "full_attention": _all_before,
    "mla": _all_before,
    "sliding_window": _window_before,
    "chunked_local": _chunk_before,
    "linear_state": _state_at,
}
_WINDOWED = frozenset({"sliding_window", "chunked_local"})
