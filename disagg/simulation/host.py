"""A machine whose cores several workers share."""

from dataclasses import dataclass


@dataclass(slots=True)
class Host:
    """Counts who computes, as steps are longer beside others.

    Attributes:
        num_workers: that run here.
        num_computing: of them, now.
    """

    num_workers: int = 0
    num_computing: int = 0

    def others_share(self, *, computes: bool) -> float:
        """Part of the other workers that compute now, as one sees it that may compute itself.

        Who is none of the workers sees as much of all of them, at most 1.
        """
        if self.num_workers < 2:
            return 0.0
        return min(1.0, (self.num_computing - computes) / (self.num_workers - 1))
