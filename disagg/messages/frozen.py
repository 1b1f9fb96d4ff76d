"""Dataclasses that nobody writes to: the type checker refuses it, and objects cost nothing for it.

To set a field of one that is frozen at run time as well is a call: 17 fields take 2.1 µs in place
of 0.14. So it is for what is made with every request, message or token.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    _Class = TypeVar("_Class", bound=type)

    def dataclass(*, frozen: bool, slots: bool) -> Callable[[_Class], _Class]:
        """As the library's, for ``frozen`` ones: compared and hashed by their fields."""
        if not frozen:
            raise TypeError("what is written to is a dataclass of the library's")
        return dataclasses.dataclass(slots=slots, unsafe_hash=True)
