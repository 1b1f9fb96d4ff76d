"""Commands of the worker's core to its shell, to be carried out in the order given."""

from dataclasses import dataclass

from disagg.messages.session import ToRouterMessage
from disagg.messages.submit import PeerAddress
from disagg.transfer.actions import ComputeChecksums, PostRead, Send


@dataclass(frozen=True, slots=True)
class ToRouter:
    """Send a message on the session of the router that it is for, or on all: `router_of`."""

    message: ToRouterMessage


@dataclass(frozen=True, slots=True)
class ConnectPeer:
    """Have a stream to this worker, opening one if there is none."""

    peer: PeerAddress


@dataclass(frozen=True, slots=True)
class Exit:
    """End the process: the only fence against READs that may still land."""

    reason: str


@dataclass(frozen=True, slots=True)
class Drained:
    """Stop and end the process: it was asked to, and nothing goes on here any more."""


@dataclass(frozen=True, slots=True)
class CheckTransport:
    """See whether this worker's own transport can READ; if not, end as with `Exit`.

    It comes whenever there is reason to doubt: the shell bounds how often it looks.
    """

    reason: str


TierKey = tuple[int, bytes]
"""What a tier keeps a block under: its group, and a chain value that stands for all before it."""


@dataclass(frozen=True, slots=True)
class WriteTier:
    """Copy blocks of the pool into a tier; they are held until `WorkerCore.on_tier_written`."""

    copy_id: int
    tier: str
    blocks: tuple[tuple[TierKey, int], ...]
    """With their block ids."""


@dataclass(frozen=True, slots=True)
class ReadTier:
    """Copy blocks of a tier into the pool; they are held until `WorkerCore.on_tier_read`."""

    copy_id: int
    tier: str
    blocks: tuple[tuple[TierKey, int], ...]
    """With the block ids that they go to."""


@dataclass(frozen=True, slots=True)
class ClearTier:
    """Drop everything a tier has; no copy of it is under way until `WorkerCore.on_tier_cleared`."""

    tier: str


WorkerAction = (
    ToRouter
    | ConnectPeer
    | Exit
    | Drained
    | CheckTransport
    | Send
    | PostRead
    | ComputeChecksums
    | WriteTier
    | ReadTier
    | ClearTier
)


class Actions:
    """What the worker wants done since the last `take`, in order."""

    def __init__(self) -> None:
        self._actions: list[WorkerAction] = []

    def add(self, action: WorkerAction, /) -> None:
        """Append an action."""
        self._actions.append(action)

    def take(self) -> list[WorkerAction]:
        """Return all actions and forget them."""
        actions, self._actions = self._actions, []
        return actions
