"""The bytes of a small pool, as texts: whoever reads what is not there is seen."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from disagg.checking.explorer.tokens import Tokens, begun, right
from disagg.kv.blocks.block_pool import NULL_BLOCK
from disagg.scheduling.step import PLACEHOLDER, SequenceSlice, Step

NOTHING = "nothing"
OTHER = "bytes of another request"
HALF = "half-written"
OLD = "old "
"""Before what was computed, or began to be, before a reset of the prefix caches, or from such."""
FLIPPED = "flipped bits"
FAILED = "left by a step that failed"
BETWEEN = " | "
"""Between the ranks' parts of a block that differ."""

Memory = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Running:
    """A step in flight, or one that waits for it, and what its sequences consist of.

    Attributes:
        tokens: per slice, up to the end of the last block that it writes.
    """

    step: Step
    tokens: tuple[Tokens, ...]


def whole_tables(part: SequenceSlice) -> tuple[tuple[int, ...], ...]:
    """Per group the block table; the steps of an explored worker carry it whole."""
    assert part.is_new
    return tuple(change.new_blocks for change in part.table_changes)


def wrong_placeholder(in_flight: Sequence[Running]) -> str:
    """Which unknown token no step samples, if any, of the one that runs and those behind it."""
    for before, running in pairwise(in_flight):
        sampled = {
            (part.key, part.start + len(part.token_ids))
            for part in before.step.slices
            if part.sampling is not None
        }
        for part in running.step.slices:
            if PLACEHOLDER in part.token_ids and (part.key, part.start) not in sampled:
                return f"nobody samples token {part.start} of {part.key}"
    return ""


def aged(content: str) -> str:
    """What a block contains is old from now on."""
    if content.startswith(OLD) or content in ("", NOTHING, OTHER, FLIPPED, FAILED):
        return content
    return OLD + content


def launch(running: Running, memory: Memory, block_tokens: int) -> tuple[Memory, str]:
    """Memory while a step runs, and what it wrongly computes from, if anything.

    What follows on a step that failed is not computed.
    """
    content = list(memory)
    for part, tokens in zip(running.step.slices, running.tokens, strict=True):
        start, end = part.start, part.start + len(part.token_ids)
        if tuple(part.token_ids) not in (tokens[start:end], (PLACEHOLDER,)):
            return memory, f"a step computes {part.token_ids}, not {tokens[start:end]}"
        first, num_begun = divmod(start, block_tokens)
        if _is_lost(part, content, block_tokens):
            for table in whole_tables(part):
                for block in table[first : -(-end // block_tokens)]:
                    content[block] = FAILED
            continue
        num_read = first + (num_begun > 0)
        half = HALF
        if any(
            content[block].startswith(OLD) for t in whole_tables(part) for block in t[:num_read]
        ):
            half = OLD + HALF
        for table in whole_tables(part):
            for index, block in enumerate(table[: -(-end // block_tokens)]):
                wanted = [right(tokens[: (index + 1) * block_tokens])]
                if index == first:
                    wanted.append(begun(tokens[:start]))
                read = index < num_read and block != NULL_BLOCK
                if read and content[block].removeprefix(OLD) not in wanted:
                    known = wanted[-1]
                    return memory, f"a step computes from {content[block]!r} as {known!r}"
                if index >= first:
                    content[block] = half
    return tuple(content), ""


def _is_lost(part: SequenceSlice, content: Sequence[str], block_tokens: int) -> bool:
    """The step before it failed, which had the same sequence."""
    before = -(-part.start // block_tokens)
    return any(
        block != NULL_BLOCK and content[block] == FAILED
        for table in whole_tables(part)
        for block in table[:before]
    )


def leave(running: Running, memory: Memory, block_tokens: int) -> Memory:
    """Memory after a step that failed."""
    content = list(memory)
    for part in running.step.slices:
        end = part.start + len(part.token_ids)
        for table in whole_tables(part):
            for block in table[part.start // block_tokens : -(-end // block_tokens)]:
                content[block] = FAILED
    return tuple(content)


def land(running: Running, memory: Memory, block_tokens: int) -> tuple[Memory, str]:
    """Memory after a step has written, and what it overwrote, if anything."""
    content = list(memory)
    for part, tokens in zip(running.step.slices, running.tokens, strict=True):
        end = part.start + len(part.token_ids)
        if _is_lost(part, memory, block_tokens):
            continue
        for table in whole_tables(part):
            for index in range(part.start // block_tokens, -(-end // block_tokens)):
                half, full = content[table[index]], (index + 1) * block_tokens
                if half not in (HALF, OLD + HALF):
                    return memory, f"a step overwrites {half!r}"
                computed = right(tokens[:full]) if full <= end else begun(tokens[:end])
                content[table[index]] = half.removesuffix(HALF) + computed
    return tuple(content), ""


def with_part(content: str, rank: int, num_ranks: int, source: str) -> str:
    """A block's content after one rank has read its part of another block."""
    parts, others = (
        one.split(BETWEEN) if BETWEEN in one else [one] * num_ranks for one in (content, source)
    )
    parts[rank] = others[rank]
    return parts[0] if len(set(parts)) == 1 else BETWEEN.join(parts)


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
