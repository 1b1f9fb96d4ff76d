"""Canonical snapshots of a live object graph: equal bytes mean equal behaviour.

Mutable objects of our own become numbered parts, in the order in which they are met; everything
immutable is written out where it stands. So who shares an equal string with whom does not show,
and what is shared and mutable stays shared when a snapshot is thawed.
"""

import io
import pickle
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

_PLAIN, _PART, _KNOWN = "written out", "a part", "written out, unless it is a constant"


def _is_part(cls: type) -> bool:
    if not cls.__module__.startswith(("disagg.", "tests.")):
        return False
    if issubclass(cls, Enum | tuple | dict | list):
        return False
    params = getattr(cls, "__dataclass_params__", None)
    return not (is_dataclass(cls) and params is not None and params.frozen)


class _Pickler(pickle.Pickler):
    """Writes references to parts in place of the parts, and queues these."""

    def __init__(self, file: io.BytesIO, constants: dict[int, Any], kinds: dict[type, str]) -> None:
        super().__init__(file, protocol=5)
        self.fast = True  # No memo: equal values give equal bytes, whoever shares what.
        self.parts: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._constants = constants
        self._kinds = kinds

    def persistent_id(self, obj: Any) -> Any:
        kind = self._kinds.get(type(obj))
        if kind is _PLAIN:  # almost always
            return None
        if kind is None:
            cls = type(obj)
            kind = self._kinds[cls] = _PART if _is_part(cls) else _PLAIN
        if id(obj) in self._constants:
            return ("constant", id(obj))
        if kind is not _PART:
            return None
        number = self._numbers.get(id(obj))
        if number is None:
            number = self._numbers[id(obj)] = len(self.parts)
            self.parts.append(obj)
        return number


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, constants: dict[int, Any], parts: list[Any]) -> None:
        super().__init__(file)
        self._constants = constants
        self._parts = parts

    def persistent_load(self, pid: Any) -> Any:
        return self._parts[pid] if isinstance(pid, int) else self._constants[pid[1]]


class Snapshots:
    """Freezes and thaws graphs that share the given constants.

    Args:
        constants: objects that never change and are not copied; they must outlive this.
    """

    def __init__(self, constants: list[Any]) -> None:
        self._kept = constants
        self._constants = {id(one): one for one in constants}
        self._kinds = {type(one): _PART if _is_part(type(one)) else _KNOWN for one in constants}

    def freeze(self, root: Any) -> tuple[bytes, tuple[type, ...]]:
        """The graph's snapshot; the root must be a mutable object of our own."""
        file = io.BytesIO()
        pickler = _Pickler(file, self._constants, self._kinds)
        pickler.persistent_id(root)
        done = 0
        while done < len(pickler.parts):
            pickler.dump(_state(pickler.parts[done]))
            done += 1
        return file.getvalue(), tuple(map(type, pickler.parts))

    def thaw(self, frozen: tuple[bytes, tuple[type, ...]]) -> Any:
        """A new graph that behaves as the frozen one did."""
        data, classes = frozen
        parts: list[Any] = [object.__new__(cls) for cls in classes]
        unpickler = _Unpickler(io.BytesIO(data), self._constants, parts)
        for part in parts:
            state = unpickler.load()
            for name, value in state.items():
                object.__setattr__(part, name, value)
        return parts[0]


def _state(part: Any) -> dict[str, Any]:
    state: dict[str, Any] = dict(getattr(part, "__dict__", ()))
    for cls in type(part).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(part, name):
                state[name] = getattr(part, name)
    return state
