"""What the router answers to other front ends (gRPC `Match`)."""

from dataclasses import dataclass

from disagg.messages.identity import Incarnation


@dataclass(frozen=True, slots=True)
class WorkerMatch:
    """How much of a prompt's KV one worker holds, in tokens."""

    worker: Incarnation
    role: str
    usable_tokens: int
    """Longest prefix on which all groups agree."""
    group_tokens: tuple[int, ...]
    """Each group on its own."""
