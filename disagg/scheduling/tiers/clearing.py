"""A reset of the prefix cache at the tiers: they would bring back what was forgotten."""

from collections.abc import Sequence
from dataclasses import replace

from disagg.messages.session import PrefixCacheReset
from disagg.scheduling.actions import Actions, ClearTier, ToRouter
from disagg.scheduling.tiers.copies import Copies
from disagg.scheduling.tiers.index import TierIndex, TierSetting


class TierClearing:
    """Empties tiers, each once the copies that were under way have ended.

    Until then it is *closed*: nothing of it is found, nothing is read or written. What such a copy
    still writes is dropped with the rest. One that could not be emptied stays closed: it may have
    blocks from before the reset.
    Routers get their answers when every tier is empty, or said why it is not.
    """

    def __init__(
        self, out: Actions, tiers: Sequence[TierSetting], index: TierIndex, copies: Copies
    ) -> None:
        self._out, self._tiers, self._index, self._copies = out, tiers, index, copies
        self._told: set[int] = set()
        """Tiers whose shell is about to empty them."""
        self._again: set[int] = set()
        """Those of them that were to be emptied once more meanwhile."""
        self._errors: dict[str, str] = {}
        self._answers: dict[str, PrefixCacheReset] = {}
        """By the router that began the reset."""

    def begin(self) -> None:
        """Close all tiers; everything in them is to be dropped."""
        self._again |= self._told
        self._errors.clear()
        for tier in range(len(self._tiers)):
            self._index.close(tier)

    def answer(self, answer: PrefixCacheReset) -> None:
        """Send the answer to a reset when all tiers are done; a router's newest counts."""
        self._answers[answer.router] = answer
        self.pump()

    def forget_answer(self, router: str) -> None:
        """The router is gone."""
        self._answers.pop(router, None)

    def pump(self) -> None:
        """Empty those that nothing is copied to or from any more; answer after the last one."""
        closed = self._index.closed
        pending = {tier for tier in closed if self._tiers[tier].name not in self._errors}
        for tier in sorted(pending - self._told):
            if not self._copies.is_busy(tier):
                self._told.add(tier)
                self._out.add(ClearTier(self._tiers[tier].name))
        if not pending:
            for answer in self._answers.values():
                self._out.add(ToRouter(self._with_errors(answer)))
            self._answers.clear()

    def on_cleared(self, name: str, error: str) -> None:
        """The shell has emptied a tier, or failed to."""
        tier = [one.name for one in self._tiers].index(name)
        self._told.discard(tier)
        if tier in self._again:
            self._again.discard(tier)
        elif error:
            self._errors[name] = error
        else:
            self._index.closed.discard(tier)

    def _with_errors(self, answer: PrefixCacheReset) -> PrefixCacheReset:
        if answer.refused or not self._errors:
            return answer
        why = "; ".join(f"tier {name}: {error}" for name, error in self._errors.items())
        return replace(answer, refused=why)
