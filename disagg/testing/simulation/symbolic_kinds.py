"""What a query sees in a group, without block tables.

Everything that is seen flows into what is computed, in a model as here: a token's digest depends
on the token and, per group, on what its position sees of the positions before it. So wrong KV of
any group gives other digests from there on, and other tokens.
"""

from disagg.kv.kinds.kind import Spec


class GroupHistory:
    """What one sequence has computed in one group, from some position on.

    Args:
        spec: of the group.
        start: the position that is computed next.
        digests: of the positions that it sees, in order; for a state its one digest (none at 0).
    """

    def __init__(self, spec: Spec, start: int = 0, digests: tuple[int, ...] = ()) -> None:
        self._spec = spec
        first = spec.first_seen(start)
        self._first = first or 0
        self._is_state = first is None
        self._sums = [0]
        self.state = digests[0] if self._is_state and digests else 0
        """After the positions so far."""
        for digest in () if self._is_state else digests:
            self._sums.append(self._sums[-1] + digest)

    def seen(self, position: int) -> int:
        """Summary of what the next position sees of those before it."""
        first = self._spec.first_seen(position)
        return self.state if first is None else self._sums[-1] - self._sums[first - self._first]

    def append(self, digest: int) -> None:
        """The next position is computed."""
        if self._is_state:
            self.state = hash((self.state, digest))
        else:
            self._sums.append(self._sums[-1] + digest)


def digest_of(token: int, seen: tuple[int, ...]) -> int:
    """What a token at a position that sees this in its groups leaves there."""
    return hash((token, seen))
