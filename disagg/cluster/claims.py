"""Which of several supervisors of one Ray cluster is in charge; no I/O.

Every claim has a number of its own, which one supervisor alone can write, and the highest is in
charge. It is renewed again and again. Whoever waits claims the next number once the highest was
given back, its process has ended, or it was not renewed for long.
"""

import json
from dataclasses import asdict, dataclass, replace

SILENT_S = 15.0
"""A supervisor that has not renewed its claim for so long has lost it to whoever waits."""
_UNSEEN_S = 2.0
"""So much of the time between two looks counts: who stood still itself has seen nothing."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Of one supervisor.

    Attributes:
        generation: its number, from 1.
        holder: whose it is, drawn at random.
        place: host and process, for messages.
        job_id: by which Ray knows that process.
        num_renewals: how often it was renewed.
        is_given_back: its holder has ended in order.
    """

    generation: int
    holder: str
    place: str
    job_id: str
    num_renewals: int = 0
    is_given_back: bool = False

    def renewed(self) -> "Claim":
        """The same, renewed once more."""
        return replace(self, num_renewals=self.num_renewals + 1)

    def given_back(self) -> "Claim":
        """The same, which nobody holds any more."""
        return replace(self, is_given_back=True)

    def to_bytes(self) -> bytes:
        """As it is kept in the cluster."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, generation: int, data: bytes) -> "Claim":
        """From what is kept; what cannot be read counts as that of a supervisor unknown here."""
        try:
            found = json.loads(data)
            return cls(
                generation,
                str(found["holder"]),
                str(found["place"]),
                str(found["job_id"]),
                int(found["num_renewals"]),
                found["is_given_back"] is True,
            )
        except (ValueError, KeyError, TypeError):
            return cls(generation, data.hex(), "a process of another version", "")


class Standby:
    """One supervisor's wait. Times are those of one clock that only goes forward, in seconds."""

    def __init__(self) -> None:
        self._seen: Claim | None = None
        self._seen_at_s = 0.0
        self._silent_s = 0.0

    def may_claim(self, claim: Claim | None, now_s: float, *, has_ended: bool) -> bool:
        """Whether the next number is to be claimed.

        Args:
            claim: the highest there is.
            now_s: when it was read.
            has_ended: its holder's process has.
        """
        if claim is None or claim.is_given_back or has_ended:
            return True
        if claim == self._seen:
            self._silent_s += min(now_s - self._seen_at_s, _UNSEEN_S)
        else:
            self._silent_s = 0.0
        self._seen, self._seen_at_s = claim, now_s
        return self._silent_s >= SILENT_S
