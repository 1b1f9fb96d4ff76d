"""Random messages of the wire contract, from their descriptors: fields absent, random, extreme.

One bad field hides all that is behind it, so most fields of a message are sound.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

DEPTH_MAX = 4
REPEATED_MAX = 3
ABSENT, EXTREME, UNSET = 0.02, 0.03, 0.01
"""Chances of a field to be absent, or extreme, and of a choice of messages to be none."""

Known = Mapping[str, Sequence[Any]]
"""By name of a field, or of a message: values that a receiver takes, so that it looks further."""

_BOUNDS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_INTEGERS = (-1, 0, 1, 2, 3, 16, 1024, 2**31 - 1, 2**31, 2**32 - 1, 2**63)
_SIZES = (0, 1, 31, 32, 33, 64, 4096)
_FLOATS = (-0.0, 1.0, -1.0, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf)
_TEXTS = ("", " ", "\x00", "\n", "%s", "é\U0001f600", "../..", "x" * 5_000)


def _extreme(random: Random, field: FieldDescriptor) -> Any:
    if field.cpp_type in _BOUNDS:
        low, high = _BOUNDS[field.cpp_type]
        edges = [low, high, *(one for one in _INTEGERS if low <= one <= high)]
        return random.choice([*edges, random.randint(low, high)])
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return random.random() < 0.5
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return random.choice([*_FLOATS, *struct.unpack("<d", random.randbytes(8))])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return random.randbytes(random.choice(_SIZES))
    # What is no Unicode cannot be put into a message, only into raw bytes.
    return random.choice([*_TEXTS, random.randbytes(8).decode("latin-1")])


def _sound(random: Random, field: FieldDescriptor, known: Known) -> Any:
    if sound := known.get(field.name):
        return random.choice(sound)
    if field.cpp_type in _BOUNDS:
        return random.randint(0, 3)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return random.random() < 0.5
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return random.choice((0.0, 0.5, 1.0))
    return b"" if field.type == FieldDescriptor.TYPE_BYTES else "a"


def _value(random: Random, field: FieldDescriptor, known: Known, depth: int) -> Any:
    is_extreme = random.random() < EXTREME
    kind = field.message_type
    if kind is None:
        return _extreme(random, field) if is_extreme else _sound(random, field, known)
    if (sound := known.get(kind.name)) and not is_extreme:
        return random.choice(sound)
    return message(random, kind, known, depth + 1)


def _put(random: Random, made: Message, field: FieldDescriptor, known: Known, depth: int) -> None:
    kind = field.message_type
    if not field.is_repeated:
        value = _value(random, field, known, depth)
        if kind is None:
            setattr(made, field.name, value)
        else:
            getattr(made, field.name).CopyFrom(value)
        return
    for _ in range(random.randint(1, REPEATED_MAX)):
        if kind is not None and kind.GetOptions().map_entry:
            key, value = (_value(random, one, known, depth) for one in kind.fields)
            getattr(made, field.name)[key] = value
        else:
            getattr(made, field.name).append(_value(random, field, known, depth))


def message(random: Random, kind: Descriptor, known: Known, depth: int = 0) -> Message:
    """A message of a kind.

    Args:
        random: what decides.
        kind: its descriptor.
        known: sound values.
        depth: of the message in the one that was asked for.
    """
    made: Message = message_factory.GetMessageClass(kind)()
    chosen = {field.name for field in kind.fields if random.random() >= ABSENT}
    for choice in kind.oneofs:
        names = [field.name for field in choice.fields]
        if len(names) > 1:
            chosen -= set(names)
            if random.random() >= UNSET:
                chosen.add(random.choice(names))
    for field in kind.fields:
        if field.name in chosen and (depth < DEPTH_MAX or field.message_type is None):
            _put(random, made, field, known, depth)
    return made


def spoilt(random: Random, data: bytes) -> bytes:
    """Bytes of a message with one of them changed, some lost, or others in their place."""
    way = random.randrange(3)
    if way == 0 or not data:
        return random.randbytes(random.randint(1, 200))
    at = random.randrange(len(data))
    return data[:at] if way == 1 else data[:at] + random.randbytes(1) + data[at + 1 :]
