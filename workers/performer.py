"""What the worker's core wants done, done: by its streams, its transport and its tiers."""

from collections.abc import Callable, Iterable
from typing import Protocol

from disagg.messages.identity import Incarnation
from disagg.messages.peer import PeerMessage
from disagg.scheduling.actions import (
    CheckTransport,
    ClearTier,
    ConnectPeer,
    Drained,
    Exit,
    ReadTier,
    ToRouter,
    WorkerAction,
    WriteTier,
)
from disagg.transfer.actions import ComputeChecksums, PostRead, Send
from disagg.workers.checksums import ComputesChecksums
from disagg.workers.own_transport import OwnTransport
from disagg.workers.request_trace import RequestTrace
from disagg.workers.router_sessions import RouterSessions
from disagg.workers.tiers.protocol import CopiesBlocks


class PeerLinks(Protocol):
    """Streams to other workers."""

    def connect(self, peer: Incarnation, address: str) -> None:
        """Have a stream to the peer."""

    def send(self, peer: Incarnation, message: PeerMessage) -> None:
        """Queue a message; lost when there is no stream (the protocol allows for it)."""


class Performer:
    """Begins what actions say; how that ends comes back to the control as events.

    Args:
        sessions: with routers.
        transport: of the own pool.
        trace: of requests and transfers.
        tiers: None: there are none.
        checksums: None: blocks have none.
        on_failed: takes why the worker has to end.
        on_drained: called when nothing goes on any more.

    Attributes:
        links: streams to other workers; set before the first event.
    """

    def __init__(
        self,
        sessions: RouterSessions,
        transport: OwnTransport,
        trace: RequestTrace,
        tiers: CopiesBlocks | None,
        checksums: ComputesChecksums | None,
        on_failed: Callable[[str], None],
        on_drained: Callable[[], None],
    ) -> None:
        self.links: PeerLinks | None = None
        self._sessions = sessions
        self._transport = transport
        self._trace = trace
        self._tiers = tiers
        self._checksums = checksums
        self._on_failed = on_failed
        self._on_drained = on_drained

    def perform(self, actions: Iterable[WorkerAction]) -> None:
        """Do these, one after the other."""
        assert self.links is not None
        for action in actions:
            match action:
                case ToRouter(message):
                    self._trace.reported(message)
                    self._sessions.send(message)
                case Send(to, peer_message):
                    self.links.send(to, self._trace.sent(peer_message))
                case PostRead():
                    self._trace.posted(action)
                    self._transport.read(action)
                case ComputeChecksums(request_id, block_ids):
                    assert self._checksums is not None
                    self._checksums.compute(request_id, block_ids)
                case WriteTier(copy_id, tier, blocks):
                    assert self._tiers is not None
                    self._tiers.submit_write(copy_id, tier, blocks)
                case ReadTier(copy_id, tier, blocks):
                    assert self._tiers is not None
                    self._tiers.submit_read(copy_id, tier, blocks)
                case ClearTier(tier):
                    assert self._tiers is not None
                    self._tiers.submit_clear(tier)
                case ConnectPeer(peer):
                    self.links.connect(peer.incarnation, peer.address)
                case CheckTransport(reason):
                    self._transport.doubt(reason)
                case Exit(reason):
                    self._on_failed(reason)
                case Drained():
                    self._on_drained()
