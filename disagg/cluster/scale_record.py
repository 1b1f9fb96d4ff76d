"""What `disagg scale` and the supervisor tell each other, kept by Ray's head.

It lies in the key-value store of Ray's GCS: there without a process of its own, and as lasting as
the actors themselves, in Redis where the GCS is.
"""

import logging

from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from disagg.cluster.counts import Fleet, Wish
from disagg.errors import ConfigError, ExpiredError

_NAMESPACE = "disagg"
_WISH = "wish"
_FLEET = "fleet"

log = logging.getLogger(__name__)


def read_wish() -> Wish | None:
    """The counts that hold instead of the settings'; None: the settings' hold.

    Raises:
        ExpiredError: Ray's head does not answer.
    """
    found = _get(_WISH)
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
    _put(_WISH, wish.to_bytes() if wish is not None else b"")


def read_fleet() -> Fleet | None:
    """What the supervisor said last; None: it has never said anything.

    Raises:
        ExpiredError: Ray's head does not answer.
    """
    found = _get(_FLEET)
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
    _put(_FLEET, fleet.to_bytes())


def _get(key: str) -> bytes:
    try:
        return bytes(_internal_kv_get(key, namespace=_NAMESPACE) or b"")
    except (RayError, RuntimeError, OSError) as error:
        raise _no_head(error) from error


def _put(key: str, value: bytes) -> None:
    try:
        if value:
            _internal_kv_put(key, value, overwrite=True, namespace=_NAMESPACE)
        else:
            _internal_kv_del(key, namespace=_NAMESPACE)
    except (RayError, RuntimeError, OSError) as error:
        raise _no_head(error) from error


def _no_head(error: Exception) -> ExpiredError:
    return ExpiredError(f"Ray's head does not answer: {error}", param="cluster.ray_address")
