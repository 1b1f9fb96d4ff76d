"""Values kept by Ray's head, in the key-value store of its GCS.

They are there without a process of their own, and as lasting as the actors themselves: in Redis
where the GCS is. All functions raise an ExpiredError where Ray's head does not answer.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from ray.exceptions import RayError
from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_list,
    _internal_kv_put,
)

from disagg.errors import ExpiredError

_NAMESPACE = "disagg"


def get(key: str) -> bytes:
    """The value of a key; b"" where there is none."""
    with head_answers():
        return bytes(_internal_kv_get(key, namespace=_NAMESPACE) or b"")


def put(key: str, value: bytes, *, overwrite: bool = True) -> None:
    """Keep a value; where there is one and it is not to be overwritten, nothing."""
    with head_answers():
        _internal_kv_put(key, value, overwrite=overwrite, namespace=_NAMESPACE)


def delete(key: str) -> None:
    """Forget a key; nothing if it is unknown."""
    with head_answers():
        _internal_kv_del(key, namespace=_NAMESPACE)


def keys(prefix: str) -> list[str]:
    """All that begin so."""
    with head_answers():
        return [bytes(key).decode() for key in _internal_kv_list(prefix, namespace=_NAMESPACE)]


@contextmanager
def head_answers() -> Iterator[None]:
    """Around a call of Ray's head.

    Raises:
        ExpiredError: it does not answer.
    """
    try:
        yield
    except (RayError, RuntimeError, OSError) as error:
        raise ExpiredError(
            f"Ray's head does not answer: {error}", param="cluster.ray_address"
        ) from error
