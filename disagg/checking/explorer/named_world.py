"""A setting with a name, and what was seen in it."""

from dataclasses import dataclass

from disagg.checking.explorer.exploration import Exploration
from disagg.checking.explorer.lease_world import LeaseSetting, LeaseWorld
from disagg.checking.explorer.setting import Setting
from disagg.checking.explorer.world import World


@dataclass(frozen=True, slots=True)
class NamedWorld:
    """One world.

    Attributes:
        name: for the command line.
        what: what may happen in it.
        setting: of the lease's tables alone, or of whole workers.
    """

    name: str
    what: str
    setting: LeaseSetting | Setting

    def explore(self) -> Exploration:
        """Visit everything."""
        return explore(self.setting)


def explore(setting: LeaseSetting | Setting) -> Exploration:
    """Visit everything that can happen under a setting."""
    if isinstance(setting, LeaseSetting):
        return LeaseWorld(setting).explore()
    return World(setting).explore()
