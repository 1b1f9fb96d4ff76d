"""What a worker counts."""


class Counters:
    """Monotonic counts by name.

    Attributes:
        counts: as of now.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, name: str, by: int = 1) -> None:
        """It happened, so often."""
        self.counts[name] = self.counts.get(name, 0) + by
