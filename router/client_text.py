"""What clients write, where it is logged, echoed or told in an error."""

import re

REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@|~,;\-]{1,128}")
"""What may be logged, echoed in a header and written into a path. UUIDs, hex, base64, trace ids of
proxies such as ``Root=1-67891233-abcdef`` and ``a/b`` fit."""
SHOWN_CHARS_MAX = 128


def usable_as_request_id(given: str) -> bool:
    """Whether a client's id can be logged and echoed safely."""
    return REQUEST_ID.fullmatch(given) is not None


def clip(text: str) -> str:
    """Text of a client for an error, at most ``SHOWN_CHARS_MAX`` characters of it."""
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}…"
