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


@dataclass(frozen=True, slots=True)
class CacheMatch:
    """How much of a prompt's KV a server holds that is no worker, in tokens."""

    name: str
    """What the router's settings call it."""
    usable_tokens: int
    """Longest prefix on which all groups agree."""
    group_tokens: tuple[int, ...]
    """Each group on its own."""
