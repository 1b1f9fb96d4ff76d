"""The named worlds that `python -m disagg.checking` and the tests exhaust."""

from disagg.checking.explorer.exploration import Exploration
from disagg.checking.explorer.large_worlds import LARGE_WORLDS
from disagg.checking.explorer.lease_world import LeaseSetting, LeaseWorld
from disagg.checking.explorer.num_states import NUM_STATES
from disagg.checking.explorer.setting import Setting
from disagg.checking.explorer.small_worlds import SMALL_WORLDS
from disagg.checking.explorer.world import World

WORLDS = {name: setting for name, (_, setting) in (SMALL_WORLDS | LARGE_WORLDS).items()}
"""The setting of each."""


def explore(setting: LeaseSetting | Setting) -> Exploration:
    """Visit everything that can happen under a setting."""
    if isinstance(setting, LeaseSetting):
        return LeaseWorld(setting).explore()
    return World(setting).explore()


def num_states(name: str) -> str:
    """Seen when the world was last exhausted."""
    return f"{NUM_STATES[name]:,}" if name in NUM_STATES else "not counted"


def document() -> str:
    """The table in ``docs/worlds.md``."""
    lines = ["| world | what may happen | states |", "|---|---|---|"]
    lines += [
        f"| `{name}`{' (full)' if name in LARGE_WORLDS else ''} | {what} | {num_states(name)} |"
        for name, (what, _) in (SMALL_WORLDS | LARGE_WORLDS).items()
    ]
    return "\n".join(lines) + "\n"
