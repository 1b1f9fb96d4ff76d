"""``cached_property`` without the lock of Python 3.11's, which costs more than most values.

For what one thread reads. Later Pythons' own has none either.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

__all__ = ["cached_property"]

if TYPE_CHECKING:
    from functools import cached_property
else:

    class cached_property:
        """Computed when it is read first, then an attribute of the instance."""

        def __init__(self, compute: Callable[[Any], Any]) -> None:
            self._compute = compute
            self._name = compute.__name__
            self.__doc__ = compute.__doc__

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            value = instance.__dict__[self._name] = self._compute(instance)
            return value
