"""Leases that a reader asks for: prefix pulls and take-overs. Each question is answered once.

A repeated question gets its old answer again, a withdrawn one none: nothing a message says moves a
counter. What was forgotten is new; its reader, who has moved on, withdraws the answer.
"""

from disagg.messages.identity import Incarnation, Question
from disagg.messages.peer import Offers, TakeOver, WithdrawLease
from disagg.transfer.actions import LeaseAction, Send
from disagg.transfer.answered import AnsweredQuestions
from disagg.transfer.lease import GroupBlocks, Lease
from disagg.transfer.lease_states import LEASE_TABLE, LeaseEvent, LeaseState
from disagg.transfer.leases import LeaseTable


class AskedLeases:
    """Questions to this owner.

    Args:
        table: where the leases live.
        answers_max: answers remembered whose lease is not live.
    """

    def __init__(self, table: LeaseTable, answers_max: int) -> None:
        self._table = table
        self._answered = AnsweredQuestions(answers_max)

    def open_sealed(
        self, now_ms: int, question: Question, blocks: GroupBlocks, num_tokens: int
    ) -> list[LeaseAction]:
        """Lease cached blocks for a prefix pull: hold, list and seal them in one step.

        Args:
            now_ms: the time.
            question: of an `AskLease`, new.
            blocks: per group, what the reader lacks; matched in the same call.
            num_tokens: the boundary.
        """
        event = LeaseEvent.OPENED
        lease = self._create(now_ms, question, event, blocks)
        lease.is_pull = True
        lease.close(len(blocks), num_tokens)
        return [Send(lease.reader, lease.offers(0))]

    def transfer(self, now_ms: int, sender: Incarnation, transfer: TakeOver) -> list[LeaseAction]:
        """Let another reader take the sealed lease of an earlier generation over, in one step.

        The new lease holds the blocks before the old one, DEAD by then, drops them. Refused if
        the old one is not live, or the new reader lacks what the old one did not.
        """
        question = Question(sender, transfer.key, transfer.number)
        old = self._table.hand_over_of(transfer.old)
        lacked = transfer.first_lacked
        if (
            old is None
            or old.seal is None
            or not LEASE_TABLE.allows(old.state, LeaseEvent.TRANSFER)
            or self._table.hand_over_of(transfer.key) is not None
            or transfer.key.request_id != old.key.request_id
            or len(lacked) != len(old.first_lacked)
            or any(new < first for new, first in zip(lacked, old.first_lacked, strict=True))
        ):
            return self.refuse(question)
        seal, event = old.seal, LeaseEvent.TRANSFER
        blocks = old.blocks_from(lacked)
        lease = self._create(now_ms, question, event, blocks)
        lease.first_lacked = lacked
        lease.close(
            len(lacked),
            seal.num_tokens,
            seal.first_token_id,
            seal.first_logprob,
            seal.first_top_logprobs,
        )
        actions = self._table.die(old, LeaseEvent.TRANSFER, "taken over")
        self._table.is_hand_over(lease)
        return [*actions, Send(sender, lease.offers(0))]

    def refuse(self, question: Question) -> list[LeaseAction]:
        """Answer a new question with none."""
        self._answered.note(question, 0, self._table.num_live)
        return [_none(question)]

    def repeated(self, question: Question) -> list[LeaseAction] | None:
        """The old answer to a question; None if it is a new one."""
        lease_id = self._answered.lease_id(question)
        if lease_id is None:
            return None
        lease = self._table.find(lease_id)
        if lease is None or lease.state is LeaseState.ORPHANED:
            return [_none(question)]
        committed = lease.state is LeaseState.COMMITTED
        return [] if committed else [Send(lease.reader, lease.offers(0))]

    def on_withdraw(self, sender: Incarnation, withdraw: WithdrawLease) -> list[LeaseAction]:
        """The reader does not want the answer to a question, whether it was given or not."""
        question = Question(sender, withdraw.key, withdraw.number)
        lease = self._table.find(self._answered.lease_id(question) or 0)
        self._answered.note(question, 0, self._table.num_live)
        if lease is None or not LEASE_TABLE.allows(lease.state, LeaseEvent.WITHDRAW):
            return []
        return self._table.die(lease, LeaseEvent.WITHDRAW, "withdrawn")

    def on_peer_lost(self, reader: Incarnation) -> None:
        """That incarnation asks nothing any more; its leases are the table's."""
        self._answered.forget_reader(reader)

    def _create(
        self, now_ms: int, question: Question, event: LeaseEvent, blocks: GroupBlocks
    ) -> Lease:
        lease = self._table.create(now_ms, question.key, question.reader, event, blocks, question)
        self._answered.note(question, lease.lease_id, self._table.num_live)
        return lease


def _none(question: Question) -> Send:
    return Send(question.reader, Offers(question.key, 0, 0, dead=True, number=question.number))
