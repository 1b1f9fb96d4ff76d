"""The named worlds that `python -m disagg.checking` and the tests exhaust."""

from disagg.checking.explorer.large_worlds import LARGE_WORLDS
from disagg.checking.explorer.num_states import NUM_STATES
from disagg.checking.explorer.small_worlds import SMALL_WORLDS

WORLDS = {world.name: world for world in (*SMALL_WORLDS, *LARGE_WORLDS)}
ONLY_FULL = frozenset(world.name for world in LARGE_WORLDS)
SETTINGS = {name: world.setting for name, world in WORLDS.items()}


def document() -> str:
    """The table in ``docs/worlds.md``."""
    lines = ["| world | what may happen | states |", "|---|---|---|"]
    lines += [
        f"| `{name}`{' (full)' if name in ONLY_FULL else ''} | {one.what} | {NUM_STATES[name]:,} |"
        for name, one in WORLDS.items()
    ]
    return "\n".join(lines) + "\n"
