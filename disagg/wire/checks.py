"""What every decoder checks; each failure is a `ProtocolError` that names ``Message.field``."""

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import TypeVar

from google.protobuf.message import Message

from disagg.errors import ProtocolError

HASH_BYTES = 32
LINE_CHARS_MAX = 1000
NAME_CHARS_MAX = 300
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")

E = TypeVar("E", bound=StrEnum)


def malformed(parent: Message, field: str, what: str) -> ProtocolError:
    """Build the error for one field of ``parent``."""
    name = f"{parent.DESCRIPTOR.name}.{field}"
    return ProtocolError(f"{name} {what}", param=name)


def require_set(parent: Message, *fields: str) -> None:
    """Raise unless every message field named is present."""
    for field in fields:
        if not parent.HasField(field):
            raise malformed(parent, field, "is missing")


def require_text(parent: Message, *fields: str) -> None:
    """Raise unless every string field named is non-empty."""
    for field in fields:
        if not getattr(parent, field):
            raise malformed(parent, field, "is empty")


def require_line(parent: Message, field: str, chars_max: int) -> None:
    """Raise unless a string field, which is logged, is short and without control characters."""
    text: str = getattr(parent, field)
    if len(text) > chars_max:
        raise malformed(parent, field, f"has {len(text)} characters, more than {chars_max}")
    if _CONTROLS.search(text):
        raise malformed(parent, field, f"has control characters: {text!r}")


def to_line(text: str) -> str:
    """The beginning of a text that is only told further, without control characters."""
    return _CONTROLS.sub(" ", text[:LINE_CHARS_MAX])


def enum_value(kind: type[E], parent: Message, field: str) -> E:
    """Read a string field as a member of ``kind``."""
    try:
        return kind(getattr(parent, field))
    except ValueError:
        allowed = ", ".join(repr(member.value) for member in kind)
        what = f"is {getattr(parent, field)!r}, not one of {allowed}"
        raise malformed(parent, field, what) from None


def split_hashes(parent: Message, field: str) -> tuple[bytes, ...]:
    """Cut a bytes field into block hashes."""
    return cut_hashes(parent, field, getattr(parent, field))


def cut_hashes(parent: Message, field: str, joined: bytes) -> tuple[bytes, ...]:
    """Cut one entry of a repeated bytes field into block hashes."""
    if len(joined) % HASH_BYTES:
        raise malformed(parent, field, f"has {len(joined)} bytes, not a multiple of {HASH_BYTES}")
    return tuple(joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES))


def join_hashes(hashes: Sequence[bytes]) -> bytes:
    """Join block hashes into a bytes field; `ValueError` where one has the wrong length."""
    if any(len(h) != HASH_BYTES for h in hashes):
        raise ValueError(f"block hashes have {HASH_BYTES} bytes")
    return b"".join(hashes)
