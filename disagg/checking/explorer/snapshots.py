"""Canonical snapshots of live object graphs, by number: equal numbers mean equal behaviour.

Mutable objects of our own become numbered parts, in the order in which they are met, and so do
sets, whose items are sorted, and lists, dicts and deques that are met more than once; messages,
frozen sets and enumerations are numbered by their values; everything else is written out where it
stands. So who shares an equal string with whom does not show, nor how a set came to be, and what is
shared and mutable stays shared when a snapshot is thawed.
"""

import io
import pickle
from collections import deque
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

_Frozen = tuple[bytes, tuple[tuple[type, tuple[str, ...]], ...]]
"""The parts' states, and their classes with the names of their attributes."""

_PLAIN, _PART, _CONTAINER = "written out", "a part", "a part where it is shared"
_VALUE, _CONSTANT = "written once", "written out, unless it is a constant"
_CONTAINERS = (list, dict, set, deque)


def _kind(cls: type) -> str:
    if issubclass(cls, set):
        return _PART  # its items are sorted: else a set would show how it came to be
    if issubclass(cls, frozenset):
        return _VALUE
    if issubclass(cls, _CONTAINERS):
        return _CONTAINER
    if cls.__module__.startswith("disagg.messages.") or issubclass(cls, Enum):
        return _VALUE
    if not cls.__module__.startswith(("disagg.", "tests.")) or issubclass(cls, tuple):
        return _PLAIN
    params = getattr(cls, "__dataclass_params__", None)
    return _PLAIN if is_dataclass(cls) and params is not None and params.frozen else _PART


class Snapshots:
    """Freezes and thaws graphs that share the given constants; remembers all that it froze.

    Args:
        constants: objects that never change and are not copied.
    """

    def __init__(self, constants: list[Any]) -> None:
        self.constants = list(constants)
        self.numbers = {id(one): number for number, one in enumerate(constants)}
        """Of constants, by identity."""
        self.kinds: dict[type, str] = {}
        for one in constants:
            kind = _kind(type(one))
            self.kinds[type(one)] = _CONSTANT if kind is _PLAIN else kind
        self._values: dict[Any, int] = {}
        self._sharing: dict[type, set[str]] = {}
        """Attributes, by class, whose container was once met elsewhere too: to be met so again."""
        self._frozen: list[_Frozen] = []
        self._frozen_numbers: dict[_Frozen, int] = {}

    def number_of(self, value: Any) -> int:
        """Of a message, which is a constant from now on."""
        number = self._values.get((type(value), value))
        if number is None:
            number = self._values[type(value), value] = len(self.constants)
            self.numbers[id(value)] = number
            self.constants.append(value)
        return number

    def freeze(self, root: Any) -> int:
        """The number of the graph's snapshot; the root must be a mutable object of our own."""
        frozen = self._written(root)
        number = self._frozen_numbers.setdefault(frozen, len(self._frozen))
        if number == len(self._frozen):
            self._frozen.append(frozen)
        return number

    def thaw(self, number: int) -> Any:
        """A new graph that behaves as the frozen one did."""
        data, classes = self._frozen[number]
        parts: list[Any] = [cls.__new__(cls) for cls, _ in classes]  # type: ignore[call-overload]
        unpickler = _Unpickler(io.BytesIO(data), self.constants, parts)
        for part, (_, names) in zip(parts, classes, strict=True):
            *values, items = unpickler.load()
            for name, value in zip(names, values, strict=True):
                object.__setattr__(part, name, value)
            if isinstance(part, dict):
                for key, value in items:
                    dict.__setitem__(part, key, value)
            elif isinstance(part, set):
                set.update(part, items)
            elif items:
                part.extend(items)
        return parts[0]

    def _written(self, root: Any) -> _Frozen:
        """As parts the containers that are met more than once, and no others."""
        shared: set[int] = set()
        sharing, is_foreseen = self._sharing, True
        while True:
            file = io.BytesIO()
            pickler = _Pickler(file, self, shared)
            pickler.number(root)
            classes = []
            for part in pickler.parts:  # grows meanwhile
                names, values = _state(part)
                classes.append((type(part), names))
                if is_foreseen and type(part) in sharing:
                    for name, value in zip(names, values, strict=False):
                        if name in sharing[type(part)]:
                            pickler.foresee(value)
                pickler.dump(values)
            again = pickler.met_again
            if again == shared:
                if not is_foreseen:
                    self._remember(pickler.parts, shared)
                return file.getvalue(), tuple(classes)
            # What was met twice only inside of another one is found out when that is a part.
            shared, is_foreseen = again, False

    def _remember(self, parts: list[Any], shared: set[int]) -> None:
        for part in parts:
            for name, value in zip(*_state(part), strict=False):
                if id(value) in shared:
                    self._sharing.setdefault(type(part), set()).add(name)


class _Pickler(pickle.Pickler):
    """Writes numbers in place of parts and constants, and queues the parts."""

    def __init__(self, file: io.BytesIO, snapshots: Snapshots, shared: set[int]) -> None:
        super().__init__(file, protocol=5)
        self.fast = True  # No memo: equal values give equal bytes, whoever shares what.
        self.parts: list[Any] = []
        self.met_again: set[int] = set()
        """Containers that were met more than once."""
        self._numbers: dict[int, int] = {}
        self._met: dict[int, Any] = {}  # Alive, or another one would be met under its id.
        self._snapshots = snapshots
        self._kinds = snapshots.kinds
        self._constants = snapshots.numbers
        self._shared = shared

    def persistent_id(self, obj: Any) -> Any:
        kind = self._kinds.get(type(obj))
        if kind is _PLAIN:  # almost always
            return None
        if kind is None:
            cls = type(obj)
            kind = self._kinds[cls] = _kind(cls)
        number = id(obj)
        constant = self._constants.get(number)
        if constant is not None:
            return -1 - constant
        if kind is _PART:
            return self.number(obj)
        if kind is _VALUE:
            return -1 - self._snapshots.number_of(obj)
        if kind is _CONTAINER:
            if number in self._met:
                self.met_again.add(number)
            self._met[number] = obj
            if number in self._shared:
                return self.number(obj)
        return None

    def foresee(self, value: Any) -> None:
        """Make a container a part, unless it was written out already."""
        if id(value) not in self._met and self._kinds.get(type(value)) is _CONTAINER:
            self._shared.add(id(value))

    def number(self, part: Any) -> int:
        """Of a part, which is queued when it is met first."""
        number = self._numbers.get(id(part))
        if number is None:
            number = self._numbers[id(part)] = len(self.parts)
            self.parts.append(part)
        return number


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, constants: list[Any], parts: list[Any]) -> None:
        super().__init__(file)
        self._constants = constants
        self._parts = parts

    def persistent_load(self, pid: Any) -> Any:
        return self._parts[pid] if pid >= 0 else self._constants[-1 - pid]


_SLOTS: dict[type, tuple[str, ...]] = {}


def _slots(cls: type) -> tuple[str, ...]:
    if cls not in _SLOTS:
        slots = (one.__dict__.get("__slots__", ()) for one in cls.__mro__)
        names = [name for some in slots for name in ((some,) if isinstance(some, str) else some)]
        _SLOTS[cls] = tuple(name for name in names if name not in ("__dict__", "__weakref__"))
    return _SLOTS[cls]


def _state(part: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """The names of its attributes; their values, and at last its items if it is a container."""
    own: dict[str, Any] = getattr(part, "__dict__", {})
    slots = tuple(name for name in _slots(type(part)) if hasattr(part, name))
    items = _items(part) if _holds(part) else None
    return (*own, *slots), (*own.values(), *(getattr(part, name) for name in slots), items)


def _items(part: Any) -> tuple[Any, ...]:
    if isinstance(part, set):
        return tuple(sorted(part, key=repr))
    return tuple(part.items() if isinstance(part, dict) else part)


def _holds(part: Any) -> bool:
    return isinstance(part, _CONTAINERS)
