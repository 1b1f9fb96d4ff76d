"""Commands of the worker's core to its shell, to be carried out in the order given."""

from dataclasses import dataclass

from disagg.messages.session import PeerAddress, ToRouterMessage
from disagg.transfer.actions import PostRead, Send


@dataclass(frozen=True, slots=True)
class ToRouter:
    """Send a message on the router's session."""

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
class CheckTransport:
    """See whether this worker's own transport can READ; if not, end as with `Exit`.

    It comes whenever there is reason to doubt: the shell bounds how often it looks.
    """

    reason: str


WorkerAction = ToRouter | ConnectPeer | Exit | CheckTransport | Send | PostRead


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
