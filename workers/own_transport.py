"""What the control asks of its worker's own transport: READs in order, and looks at itself."""

import logging
import time
from collections import deque

from disagg.errors import CapacityError
from disagg.messages.identity import Incarnation
from disagg.transfer.actions import PostRead
from disagg.workers.transport import KVTransport, agent_name

log = logging.getLogger(__name__)

CHECKS = 2
"""Once in doubt; a device that has just vanished may let the first one pass (seen with UCX)."""
CHECK_S = 1.0
"""Between two checks, however much is doubted."""


class OwnTransport:
    """READs that wait until the transport takes them, and checks that wait until they are due.

    No more READs can wait than the pool has blocks: each holds its destinations.
    """

    def __init__(self, transport: KVTransport) -> None:
        self._transport = transport
        self._reads: deque[PostRead] = deque()
        self._num_checks = 0
        self._check_due_s = 0.0

    @property
    def failure(self) -> str:
        """Why nothing can be read any more; "" while all is well."""
        return self._transport.failure

    @property
    def num_waiting(self) -> int:
        """READs that the transport has not taken."""
        return len(self._reads)

    def read(self, read: PostRead) -> None:
        """Let a READ wait for its turn."""
        self._reads.append(read)

    def post_reads(self) -> None:
        """Give the transport what waits for it, in order, until it has enough.

        Called after every event of the control, so at the next tick at the latest.
        """
        while self._reads:
            read = self._reads[0]
            owner = agent_name(read.owner)
            try:
                self._transport.read(
                    read.read_id, owner, read.src_blocks, read.dst_blocks, read.parts
                )
            except CapacityError:
                return
            self._reads.popleft()

    def remove_peer(self, peer: Incarnation) -> None:
        """Forget a peer; what is not posted to it yet fails."""
        self._transport.remove_peer(agent_name(peer))

    def doubt(self, reason: str) -> None:
        """Have the transport check itself soon."""
        if not self._num_checks:
            log.warning("the own transport is checked: %s", reason)
        self._num_checks = CHECKS

    def check(self) -> None:
        """Make the transport check itself, if there is doubt and a check is due."""
        now_s = time.monotonic()
        if self._num_checks and now_s >= self._check_due_s:
            self._num_checks -= 1
            self._check_due_s = now_s + CHECK_S
            self._transport.check()
