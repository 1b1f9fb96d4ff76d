"""The bytes of a small pool, as texts: whoever reads what is not there is seen."""

from collections.abc import Callable, Collection

from disagg.checking.explorer.pair_worker import Facts
from disagg.kv.blocks.block_pool import NULL_BLOCK
from disagg.messages.identity import RequestKey
from disagg.scheduling.step import SequenceSlice, Step

NOTHING = "nothing"
OTHER = "bytes of another request"
HALF = "half-written"

Memory = tuple[str, ...]

SAME_PROMPT: Callable[[RequestKey], int] = lambda key: 0  # noqa: E731
"""Where a request's positions begin among those of all prompts; here every prompt is the same."""


def right(position: int) -> str:
    """What the full block at a position must contain."""
    return f"KV {position}"


def begun(position: int) -> str:
    """What a block contains of which the last tokens are not computed yet."""
    return f"KV {position}, begun"


def whole_tables(part: SequenceSlice) -> tuple[tuple[int, ...], ...]:
    """Per group the block table; the steps of an explored worker carry it whole."""
    assert part.is_new
    return tuple(change.new_blocks for change in part.table_changes)


def launch(
    step: Step,
    memory: Memory,
    first: Callable[[RequestKey], int] = SAME_PROMPT,
    *,
    block_tokens: int = 1,
) -> tuple[Memory, str]:
    """Memory while a step runs, and which wrong bytes it computes from, if any."""
    content = list(memory)
    for part in step.slices:
        num_full, num_begun = divmod(part.start, block_tokens)
        end = -(-(part.start + len(part.token_ids)) // block_tokens)
        offset = first(part.key)
        for table in whole_tables(part):
            for position, block in enumerate(table[:end]):
                wanted = [right(offset + position)]
                if position == num_full:
                    wanted.append(begun(offset + position))
                read = position < num_full + (num_begun > 0)
                if read and block != NULL_BLOCK and content[block] not in wanted:
                    return memory, f"a step computes from {content[block]!r} at {position}"
                if position >= num_full:
                    content[block] = HALF
    return tuple(content), ""


def land(
    step: Step,
    memory: Memory,
    first: Callable[[RequestKey], int] = SAME_PROMPT,
    *,
    block_tokens: int = 1,
) -> tuple[Memory, str]:
    """Memory after a step has written, and what it overwrote, if anything."""
    content = list(memory)
    for part in step.slices:
        offset, end = first(part.key), part.start + len(part.token_ids)
        for table in whole_tables(part):
            for position in range(part.start // block_tokens, -(-end // block_tokens)):
                if content[table[position]] != HALF:
                    return memory, f"a step overwrites {content[table[position]]!r}"
                is_full = (position + 1) * block_tokens <= end
                content[table[position]] = (right if is_full else begun)(offset + position)
    return tuple(content), ""


def reuse(
    memory: Memory, held_before: Collection[int], held: Collection[int], cached: Collection[int]
) -> Memory:
    """Memory after whatever is free, or was taken anew, was overwritten: the worst moment."""
    return tuple(
        content
        if content == NOTHING or block in cached or (block in held and block in held_before)
        else OTHER
        for block, content in enumerate(memory)
    )


def after_move(
    memory: Memory,
    before: Facts,
    after: Facts,
    launched: Step | None,
    first: Callable[[RequestKey], int] = SAME_PROMPT,
    *,
    block_tokens: int = 1,
) -> tuple[Memory, str]:
    """Memory after a worker's move, a step it launched running; and what is wrong, if anything."""
    memory = reuse(memory, before.held, after.held, {block for _, block in after.cached})
    for position, block in after.cached:
        if memory[block] != right(position):
            return memory, f"the cache offers {memory[block]!r} as position {position}"
    if launched is None:
        return memory, ""
    return launch(launched, memory, first, block_tokens=block_tokens)
