"""Tokens that say which generation sampled them, and KV that says which tokens it is of.

Two workers never compute quite the same: what one samples another one need not. So a token here is
a function of its generation and position, and the KV of a position one of all tokens up to it.
"""

from disagg.checking.explorer.pair_memory import HALF, Memory, whole_tables
from disagg.kv.blocks.block_pool import NULL_BLOCK
from disagg.kv.hashing import BlockHasher
from disagg.messages.identity import RequestKey
from disagg.scheduling.step import SequenceSlice, Step

PROMPT = (5, 6)
Tokens = tuple[int, ...]


def sampled(generation: int, position: int) -> int:
    """What a worker samples."""
    return 10 * generation + position


class Prefixes:
    """All sequences of tokens that can come of the prompt, numbered.

    Attributes:
        numbers: by the hash of the block in which a sequence ends.
    """

    def __init__(self, hasher: BlockHasher, max_tokens: int, generations_max: int) -> None:
        self.numbers: dict[bytes, int] = {}
        self._tokens: list[Tokens] = []
        grown: list[Tokens] = [PROMPT]
        for length in range(1, len(PROMPT) + 1):
            self._add(hasher, PROMPT[:length])
        for position in range(len(PROMPT), len(PROMPT) + max_tokens):
            nexts = [sampled(one, position) for one in range(1, generations_max + 1)]
            grown = [(*tokens, token) for tokens in grown for token in nexts]
            for tokens in grown:
                self._add(hasher, tokens)

    def _add(self, hasher: BlockHasher, tokens: Tokens) -> None:
        hashes: list[bytes] = []
        hasher.extend(hashes, tokens)
        self.numbers[hashes[-1]] = len(self._tokens)
        self._tokens.append(tokens)

    def content(self, number: int) -> str:
        """What the block with this hash must contain."""
        return right(self._tokens[number])


def right(tokens: Tokens) -> str:
    """What the block must contain that ends with these tokens."""
    return "KV of " + " ".join(map(str, tokens))


class Prompts(tuple[Tokens, ...]):
    """What the router has given each generation to go on from, the first at 0."""

    __slots__ = ()

    def tokens(self, key: RequestKey, length: int) -> Tokens:
        """A generation's tokens up to a length."""
        prompt = self[key.generation - 1]
        more = range(len(prompt), length)
        return (*prompt, *(sampled(key.generation, position) for position in more))[:length]


def launch(step: Step, memory: Memory, prompts: Prompts) -> tuple[Memory, str]:
    """Memory while a step runs, and what it wrongly computes from, if anything."""
    content = list(memory)
    for part in step.slices:
        end = part.start + len(part.token_ids)
        tokens = prompts.tokens(part.key, end)
        if tuple(part.token_ids) != tokens[part.start :]:
            return memory, f"a step computes {part.token_ids}, not {tokens[part.start :]}"
        for table in whole_tables(part):
            for position, block in enumerate(table[:end]):
                known = right(tokens[: position + 1])
                if position >= part.start:
                    content[block] = HALF
                elif block != NULL_BLOCK and content[block] != known:
                    return memory, f"a step computes from {content[block]!r} as {known!r}"
    return tuple(content), ""


def land(step: Step, memory: Memory, prompts: Prompts) -> tuple[Memory, str]:
    """Memory after a step has written, and what it overwrote, if anything."""
    content = list(memory)
    for part in step.slices:
        end = part.start + len(part.token_ids)
        tokens = prompts.tokens(part.key, end)
        for table in whole_tables(part):
            for position in range(part.start, end):
                if content[table[position]] != HALF:
                    return memory, f"a step overwrites {content[table[position]]!r}"
                content[table[position]] = right(tokens[: position + 1])
    return tuple(content), ""


def samples(part: SequenceSlice) -> int:
    """The token that comes of a slice."""
    return sampled(part.key.generation, part.start + len(part.token_ids))


def wrong_next(prompts: Prompts, received: Tokens, token: int) -> str:
    """Why a token must not follow what the client has, if it must not."""
    generation, position = divmod(token, 10)
    before = (*PROMPT, *received)
    if position < len(before):
        return f"the client gets token {position - len(PROMPT)} twice"
    if position > len(before):
        return f"the client never gets token {len(before) - len(PROMPT)}"
    if prompts.tokens(RequestKey("", generation), position) != before:
        return f"the client gets {token}, which was sampled after other tokens than {received}"
    return ""
