"""How many workers are wanted now: as settings, `disagg scale` or the load say."""

from collections.abc import Mapping
from dataclasses import replace

from disagg.cluster.counts import BY_HAND, BY_LOAD, BY_SETTINGS, Counts, Wish
from disagg.cluster.load_watch import watch_load
from disagg.cluster.scale_record import write_wish
from disagg.cluster.supervised import Report
from disagg.config import Settings


class WantedCounts:
    """Begins with the counts of the settings. Not thread-safe.

    Attributes:
        counts: workers that are wanted.
        by: who wants them: `BY_SETTINGS`, `BY_HAND` or `BY_LOAD`; "" before the first `follow`.

    Raises:
        ConfigError: the automatic mode cannot read its key.
    """

    def __init__(self, settings: Settings, report: Report) -> None:
        self.counts = Counts.of_settings(settings)
        self.by = ""
        self._of_settings = self.counts
        self._report = report
        self._ranges = tuple(settings.autoscale.ranges)
        self._load_watch = watch_load(settings)

    def close(self) -> None:
        """Ask no router any more."""
        if self._load_watch is not None:
            self._load_watch.close()

    def follow(self, wish: Wish | None, serving: Mapping[str, str]) -> bool:
        """Want what settings, an operator or the load say; returns whether that has changed.

        What the load says is written down as a wish: the next supervisor goes on from there.

        Args:
            wish: that was written last.
            serving: role by id of the workers that serve.

        Raises:
            ExpiredError: Ray's head does not answer.
        """
        counts, by = self._of_settings, BY_SETTINGS
        if wish is not None and wish.by_hand:
            counts, by = wish.counts, BY_HAND
        elif self._load_watch is not None:
            if wish is not None:  # roles without a range are as the settings say
                counts = replace(
                    counts, **{role: wish.counts.by_role[role] for role in self._ranges}
                )
            by = BY_LOAD
            decided, why = self._load_watch.decide(counts, serving)
            if decided != counts:
                self._report(why)
                write_wish(Wish(decided, by_hand=False))
            counts = decided
        if (counts, by) == (self.counts, self.by):
            return False
        if by != BY_SETTINGS or self.by:
            self._report(f"wanted, by {by}: {counts}")
        self.counts, self.by = counts, by
        return True
