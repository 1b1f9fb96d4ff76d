"""Bytes of KV that a plan moves, per group, by the rules of the transfer itself."""

from dataclasses import replace
from functools import lru_cache

from disagg.kv.kinds.registry import KINDS, sees_everything
from disagg.messages.registration import GroupInfo, WorkerInfo


@lru_cache(maxsize=256)
def _by_token(group: GroupInfo) -> GroupInfo:
    return replace(group, block_tokens=1)


def _first_seen(group: GroupInfo, num_tokens: int) -> int:
    """First position that a query after so many tokens reads: the boundary rule, token by token."""
    return KINDS[group.kind].first_needed(_by_token(group), num_tokens)


def blocks_seen(group: GroupInfo, num_tokens: int, num_held: int = 0) -> int:
    """Positions of a block table that a query after so many tokens reads, but those held already.

    Args:
        group: of the layout.
        num_tokens: of the prompt.
        num_held: tokens whose blocks the reader has, counted from the first one.
    """
    first = _first_seen(group, num_tokens)
    if first >= num_tokens:
        return 0
    end = -(-num_tokens // group.block_tokens)
    return max(0, end - max(first // group.block_tokens, num_held // group.block_tokens))


def _block_bytes(info: WorkerInfo, number: int) -> int:
    """Bytes of a position of a group's table: of a block, or of a state of several."""
    return info.contract.block_bytes * _num_blocks(info, number)


def _num_blocks(info: WorkerInfo, number: int) -> int:
    forms = info.contract.forms
    return forms[number].blocks_per_state if forms else 1


def tokens_of(info: WorkerInfo, num_bytes: int) -> float:
    """Tokens of a prompt whose KV, of all groups, takes so many bytes of a worker's cache."""
    if not num_bytes:
        return 0.0
    groups = enumerate(info.groups)
    return num_bytes / sum(_block_bytes(info, n) / group.block_tokens for n, group in groups)


def num_blocks_of(info: WorkerInfo, num_tokens: int, num_held: int) -> int:
    """Blocks of a worker's pool that a prompt takes at its end, without the tokens held there."""
    return sum(
        blocks_seen(group, num_tokens, num_held) * _num_blocks(info, number)
        for number, group in enumerate(info.groups)
    )


def handover_bytes(
    info: WorkerInfo, num_tokens: int, num_held: int, num_at_end: int
) -> tuple[int, int]:
    """What a decode worker reads of a prompt that is computed elsewhere.

    Of groups that see everything, what all of them have stays; others move whole, as only the run
    that ends at the prompt's end is of use.

    Args:
        info: of the decode worker.
        num_tokens: of the prompt.
        num_held: tokens that all groups have there that see everything.
        num_at_end: tokens of the last chunk, whose blocks are complete only at the end.

    Returns:
        All bytes, and those that can be read only when the prompt is computed.
    """
    total = at_end = 0
    for number, group in enumerate(info.groups):
        size = _block_bytes(info, number)
        if sees_everything(group):
            blocks = blocks_seen(group, num_tokens, num_held)
            last = min(blocks, blocks_seen(group, num_tokens, max(0, num_tokens - num_at_end)))
        else:
            blocks = last = blocks_seen(group, num_tokens)
        total += blocks * size
        at_end += last * size
    return total, at_end


def pull_bytes(info: WorkerInfo, num_tokens: int, num_held: int) -> int:
    """What a worker reads of a prefix that another one has; hits of all kinds count.

    Args:
        info: of the reader.
        num_tokens: of the prefix.
        num_held: tokens of it on which the reader's groups agree already.
    """
    return sum(
        blocks_seen(group, num_tokens, num_held) * _block_bytes(info, number)
        for number, group in enumerate(info.groups)
    )
