"""Workers that speak as an older and as a newer release do; what they compute is the same.

The older one knows no optional field that is numbered from 15 on: it sends none, and what comes
loses them. The newer one has a wider range of wire versions, and fields of its own in every
message, nested ones too.
"""

from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from disagg.messages.registration import WIRE_MAX
from disagg.workers import announcement, peer_links, registration, service

NEWEST_FROM = 15
LATER_FIELDS = bytes([0xA0, 0x38, 7]) + bytes([0xAA, 0x38, 5]) + b"later"
"""Field 900, a number, and field 901, a text."""


def forget_newest(message: Message) -> None:
    for field, value in message.ListFields():
        if field.containing_oneof is None and field.number >= NEWEST_FROM:
            message.ClearField(field.name)
        else:
            each_message(field, value, forget_newest)


def add_later(message: Message) -> None:
    for field, value in message.ListFields():
        each_message(field, value, add_later)
    message.MergeFromString(LATER_FIELDS)


def each_message(field: Any, value: Any, change: Callable[[Message], None]) -> None:
    if field.message_type is None or field.message_type.GetOptions().map_entry:
        return
    for one in value if field.is_repeated else (value,):
        change(one)


def speak(change: Callable[[Message], None], module: Any, *names: str) -> None:
    """Change what functions of a module encode, or what they are to decode."""
    for name in names:
        function = getattr(module, name)

        def encoded(*given: Any, of: Callable[..., Message] = function, **more: Any) -> Message:
            message = of(*given, **more)
            change(message)
            return message

        def decoded(message: Message, *given: Any, of: Any = function, **more: Any) -> Any:
            change(message)
            return of(message, *given, **more)

        setattr(module, name, encoded if name.endswith("to_wire") else decoded)


def become(release: str) -> None:
    """Let this process speak as a release: ``older``, ``newer``, or ``future``, which has left
    the wire version of today behind."""
    if release == "older":
        speak(forget_newest, service, "session_request_from_wire")
    elif release == "newer":
        vars(announcement)["WIRE_MAX"] = WIRE_MAX + 1
    else:
        vars(announcement).update(WIRE_MIN=WIRE_MAX + 1, WIRE_MAX=WIRE_MAX + 1)
    change = forget_newest if release == "older" else add_later
    speak(change, service, "session_response_to_wire", "kv_batch_to_wire")
    speak(change, registration, "worker_info_to_wire")
    speak(change, peer_links, "peer_to_wire")
