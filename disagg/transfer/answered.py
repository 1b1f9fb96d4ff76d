"""Which lease a reader's question was answered with, so that a repeated one gets the same."""

from disagg.messages.identity import Incarnation, Question


class AnsweredQuestions:
    """Questions and the ids of their leases, 0 for none; bounded.

    A forgotten one is a new one: its reader withdraws the answer, as it has moved on.

    Args:
        ended_max: how many are remembered whose lease is not live.
    """

    def __init__(self, ended_max: int) -> None:
        self._ended_max = ended_max
        self._lease_ids: dict[Question, int] = {}

    def lease_id(self, question: Question) -> int | None:
        """What it was answered with; None for a new question."""
        return self._lease_ids.get(question)

    def note(self, question: Question, lease_id: int, num_live: int) -> None:
        """Remember an answer; the oldest beyond the bound are forgotten.

        ``num_live`` leases are live now, so that none of theirs is among the forgotten as long
        as they are younger.
        """
        self._lease_ids[question] = lease_id
        while len(self._lease_ids) > self._ended_max + num_live:
            del self._lease_ids[next(iter(self._lease_ids))]

    def forget_reader(self, reader: Incarnation) -> None:
        """That incarnation asks nothing any more."""
        self._lease_ids = {q: n for q, n in self._lease_ids.items() if q.reader != reader}
