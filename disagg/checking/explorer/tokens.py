"""Tokens that say after what they were sampled, and KV that says which tokens it is of.

Two workers never compute quite the same: what one samples another one need not. So a token here is
a function of its generation and of all tokens before it, and the KV of a block one of all tokens up
to its end.
"""

from disagg.checking.explorer.setting import Setting
from disagg.kv.hashing import BlockHasher

Tokens = tuple[int, ...]


def right(tokens: Tokens) -> str:
    """What the block must contain that ends with these tokens."""
    return "KV of " + " ".join(map(str, tokens))


def begun(tokens: Tokens) -> str:
    """What a block contains of which the tokens after these are not computed yet."""
    return f"{right(tokens)}, begun"


class Vocabulary:
    """Every token that was ever sampled, and every block of tokens that can be cached.

    Attributes:
        contents: what the block must contain that is cached under a hash.
    """

    def __init__(self, hasher: BlockHasher, setting: Setting) -> None:
        self.contents: dict[bytes, str] = {}
        self._hasher = hasher
        self._sampled: dict[tuple[int, Tokens], int] = {}
        self._before: dict[int, tuple[int, Tokens]] = {}
        for request in setting.requests:
            self._add(request.prompt)

    def sample(self, generation: int, tokens: Tokens) -> int:
        """What a worker samples after these: the generation, then the position, in decimals."""
        token = self._sampled.get((generation, tokens))
        if token is None:
            token = 10 * generation + len(tokens)
            while token in self._before:
                token += 100
            self._sampled[generation, tokens] = token
            self._before[token] = generation, tokens
            self._add((*tokens, token))
        return token

    def extended(self, tokens: Tokens, generation: int, length: int) -> Tokens:
        """A sequence's tokens up to a length, from those that its generation was given."""
        while len(tokens) < length:
            tokens = (*tokens, self.sample(generation, tokens))
        return tokens[:length]

    def wrong_next(self, prompt: Tokens, received: Tokens, token: int) -> str:
        """Why a token must not follow what the client has, if it must not."""
        _, before = self._before[token]
        position = len(before) - len(prompt)
        if position < len(received):
            return f"the client gets token {position} twice"
        if position > len(received):
            return f"the client never gets token {len(received)}"
        if before != (*prompt, *received):
            return f"the client gets {token}, which was sampled after other tokens than {received}"
        return ""

    def _add(self, tokens: Tokens) -> None:
        hashes: list[bytes] = []
        self._hasher.extend(hashes, tokens)
        for number, value in enumerate(hashes, 1):
            self.contents[value] = right(tokens[: number * self._hasher.block_tokens])
