"""What `disagg scale` and the supervisor tell each other, kept by Ray's head."""

import logging

from disagg.cluster import head_store
from disagg.cluster.counts import Fleet, Wish
from disagg.errors import ConfigError

_WISH = "wish"
_FLEET = "fleet"

log = logging.getLogger(__name__)


def read_wish() -> Wish | None:
    """The counts that hold instead of the settings'; None: the settings' hold.

    Raises:
        ExpiredError: Ray's head does not answer.
    """
    found = head_store.get(_WISH)
    try:
        return Wish.from_bytes(found) if found else None
    except ConfigError as error:  # of another version: the settings hold
        log.warning("%s", error.message)
        return None


def write_wish(wish: Wish | None) -> None:
    """Let counts hold from now on; None: those of the settings.

    Raises:
        ExpiredError: Ray's head does not answer.
    """
    if wish is None:
        head_store.delete(_WISH)
    else:
        head_store.put(_WISH, wish.to_bytes())


def read_fleet() -> Fleet | None:
    """What the supervisor said last; None: it has never said anything.

    Raises:
        ExpiredError: Ray's head does not answer.
    """
    found = head_store.get(_FLEET)
    try:
        return Fleet.from_bytes(found) if found else None
    except ConfigError as error:
        log.warning("%s", error.message)
        return None


def write_fleet(fleet: Fleet) -> None:
    """Say what there is; to be done by the supervisor alone.

    Raises:
        ExpiredError: Ray's head does not answer.
    """
    head_store.put(_FLEET, fleet.to_bytes())
