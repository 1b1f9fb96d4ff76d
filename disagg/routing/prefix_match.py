"""Which workers hold everything that one KV cache group needs at each block boundary.

Workers are bits of an int, so one pass answers for the whole fleet. What a kind of group needs is
defined in its file in ``disagg.kv.kinds``.
"""

from collections.abc import Sequence

from disagg.errors import ConfigError
from disagg.kv.kinds.registry import KINDS
from disagg.messages.registration import GroupInfo


def check_group(group: GroupInfo, hash_block_tokens: int) -> None:
    """Refuse what could not be matched exactly.

    Raises:
        ConfigError: naming the field.
    """
    if group.kind not in KINDS:
        raise ConfigError(
            f"unknown kind of KV cache group {group.kind!r}; known: {', '.join(sorted(KINDS))}",
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
    KINDS[group.kind].check_group(group)


def usable_at(group: GroupInfo, holders: Sequence[int]) -> list[int]:
    """Bit sets of the workers that can go on after block ``i``, for every ``i``.

    Args:
        group: checked by `check_group`.
        holders: ``holders[i]`` is the bit set of workers that hold block ``i`` of the prompt.
    """
    return KINDS[group.kind].usable_at(group, holders)
