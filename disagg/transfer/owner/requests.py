"""Leases that a reader requests: prefix pulls and take-overs. Each request is answered once.

A repeated request gets its old answer again, a withdrawn one is refused: no message moves a
counter. What was forgotten is new; its reader, who has moved on, withdraws the answer.
"""

from disagg.messages.identity import Incarnation, LeaseRequest
from disagg.messages.peer import LeaseLoading, LeaseRefused, TakeOver, WithdrawLease
from disagg.transfer.actions import LeaseListener, Send
from disagg.transfer.owner.lease import GroupBlocks, Lease
from disagg.transfer.owner.states import LEASE_TABLE, LeaseEvent, LeaseState
from disagg.transfer.owner.table import LeaseTable


class LeaseAnswers:
    """Requests that this owner has answered, and the ids of the leases they were answered with.

    Args:
        table: where the leases live.
        answers_max: answers remembered whose lease is not live.
    """

    def __init__(self, table: LeaseTable, answers_max: int) -> None:
        self._table = table
        self._answers_max = answers_max
        self._lease_ids: dict[LeaseRequest, int | None] = {}
        """None for a refusal."""

    def open_sealed(
        self,
        now_ms: int,
        request: LeaseRequest,
        blocks: GroupBlocks,
        num_tokens: int,
        listener: LeaseListener,
    ) -> None:
        """Lease cached blocks for a prefix pull: hold, list and seal them in one step.

        Args:
            now_ms: the time.
            request: of an `AskLease`, new.
            blocks: per group, what the reader lacks; matched in the same call.
            num_tokens: the boundary.
            listener: gets the lease's news.
        """
        lease = self._create(now_ms, request, LeaseEvent.OPENED, blocks, listener)
        lease.is_pull = True
        lease.close(len(blocks), num_tokens)
        self._table.tell(lease, 0)

    def take_over(
        self, now_ms: int, sender: Incarnation, message: TakeOver, listener: LeaseListener
    ) -> None:
        """Let another reader take the sealed lease of an earlier generation over, in one step.

        The new lease holds the blocks before the old one, DEAD by then, drops them. Refused if
        the old one is not live, or the new reader lacks what the old one did not. The message's
        ``first_lacked`` must count in this owner's blocks, as leases do.
        """
        request = LeaseRequest(sender, message.key, message.number)
        old = self._table.hand_over_of(message.old)
        lacked = message.first_lacked
        if (
            old is None
            or old.seal is None
            or not LEASE_TABLE.allows(old.state, LeaseEvent.TRANSFER)
            or self._table.hand_over_of(message.key) is not None
            or message.key.request_id != old.key.request_id
            or len(lacked) != len(old.first_lacked)
            or any(new < first for new, first in zip(lacked, old.first_lacked, strict=True))
        ):
            self.refuse(request)
            return
        seal = old.seal
        lease = self._create(
            now_ms, request, LeaseEvent.TRANSFER, old.blocks_from(lacked), listener
        )
        lease.first_lacked = lacked
        lease.close(
            len(lacked),
            seal.num_tokens,
            seal.first_token_id,
            seal.first_logprob,
            seal.first_top_logprobs,
        )
        self._table.die(old, LeaseEvent.TRANSFER, "taken over")
        self._table.is_hand_over(lease)
        self._table.tell(lease, 0)

    def refuse(self, request: LeaseRequest) -> None:
        """Refuse a request that has no answer yet."""
        self._note(request, None)
        self._send_refusal(request)

    def knows(self, request: LeaseRequest) -> bool:
        """Whether a request was answered, or withdrawn."""
        return request in self._lease_ids

    def repeat(self, request: LeaseRequest) -> bool:
        """Answer a repeated request as before; False if it is a new one."""
        if request not in self._lease_ids:
            return False
        lease = self._lease_of(request)
        if lease is None or lease.state is LeaseState.ORPHANED:
            self._send_refusal(request)
        elif not lease.is_ready and lease.state is not LeaseState.COMMITTED:
            num_ready = lease.num_blocks + lease.num_summed  # more than while a tier brought them
            loading = LeaseLoading(request.key, request.number, num_ready)
            self._table.out.add(Send(lease.reader, loading))
        elif lease.state is not LeaseState.COMMITTED:
            self._table.tell(lease, 0)
        return True

    def on_withdraw(self, sender: Incarnation, withdraw: WithdrawLease) -> None:
        """The reader gives a request up, whether it was answered or not."""
        request = LeaseRequest(sender, withdraw.key, withdraw.number)
        lease = self._lease_of(request)
        self._note(request, None)
        if lease is not None and LEASE_TABLE.allows(lease.state, LeaseEvent.WITHDRAW):
            self._table.die(lease, LeaseEvent.WITHDRAW, "withdrawn")

    def on_peer_lost(self, reader: Incarnation) -> None:
        """Forget the requests of an incarnation; its leases are the table's business."""
        self._lease_ids = {one: n for one, n in self._lease_ids.items() if one.reader != reader}

    # -- inside -------------------------------------------------------------------------------

    def _lease_of(self, request: LeaseRequest) -> Lease | None:
        lease_id = self._lease_ids.get(request)
        return None if lease_id is None else self._table.find(lease_id)

    def _create(
        self,
        now_ms: int,
        request: LeaseRequest,
        event: LeaseEvent,
        blocks: GroupBlocks,
        listener: LeaseListener,
    ) -> Lease:
        lease = self._table.create(
            now_ms, request.key, request.reader, event, blocks, listener, request
        )
        self._note(request, lease.lease_id)
        return lease

    def _note(self, request: LeaseRequest, lease_id: int | None) -> None:
        """Remember an answer; the oldest beyond the bound whose lease is not live are forgotten."""
        self._lease_ids[request] = lease_id
        while len(self._lease_ids) > self._answers_max + self._table.num_live:
            over = (one for one in self._lease_ids if not self._is_live(one))
            del self._lease_ids[next(over)]

    def _is_live(self, request: LeaseRequest) -> bool:
        lease = self._lease_of(request)
        return lease is not None and lease.state is not LeaseState.COMMITTED

    def _send_refusal(self, request: LeaseRequest) -> None:
        self._table.out.add(Send(request.reader, LeaseRefused(request.key, request.number)))
