"""Settings of the automatic mode, which scales the workers by what requests wait."""

import re
import urllib.parse
from typing import Annotated

from pydantic import AfterValidator, Field

from disagg.config.fields import Milliseconds, Section

RangeText = Annotated[str, Field(pattern=r"^([1-9][0-9]{0,3}-[1-9][0-9]{0,3})?$")]
COUNT_MAX = 1024
_NAME = re.compile(r"dns:([^\s:/]+):([1-9][0-9]{0,4})")
_PORT_MAX = 65_535


def parse_range(text: str) -> tuple[int, int]:
    """Fewest and most of ``1-4``.

    Raises:
        ValueError: the first is larger than the second, or there may be too many.
    """
    low, _, high = text.partition("-")
    if not int(low) <= int(high) <= COUNT_MAX:
        raise ValueError(f"{text!r} is no range from 1 to {COUNT_MAX}")
    return int(low), int(high)


def _checked(text: str) -> str:
    if text:
        parse_range(text)
    return text


def parse_name(url: str) -> tuple[str, int] | None:
    """Name and port of ``dns:name:port``; None of a URL."""
    found = _NAME.fullmatch(url)
    return (found[1], int(found[2])) if found else None


def _checked_url(url: str) -> str:
    named = parse_name(url)
    if named is not None:
        is_sound = named[1] <= _PORT_MAX
    else:
        try:
            parts = urllib.parse.urlsplit(url)
            is_sound = parts.scheme in ("http", "https") and bool(parts.hostname)
            parts.port  # noqa: B018  # raises where it is none
        except ValueError:
            is_sound = False
    if not is_sound:
        raise ValueError(f"{url!r} is neither an http:// URL nor dns:name:port")
    return url


RouterUrl = Annotated[str, AfterValidator(_checked_url)]
CountRange = Annotated[RangeText, AfterValidator(_checked)]


class AutoscaleSettings(Section):
    """The automatic mode: more workers while requests wait too long, fewer when they hardly do."""

    prefill: CountRange = ""
    """Fewest and most prefill workers, as 1-4; empty: their number is cluster.num_prefill."""
    decode: CountRange = ""
    """The same for decode workers."""
    both: CountRange = ""
    """The same for workers without a preferred role."""
    target_queue_ms: Milliseconds = 2_000
    """Nine of ten requests are to wait no longer for their turn."""
    up_after_ms: Milliseconds = 10_000
    """They have waited longer for so long before there is one worker more; the next one only when
    that one serves."""
    down_after_ms: Milliseconds = 300_000
    """They have waited less than a quarter of it for so long before there is one worker fewer. A
    number that was too few is tried again after twice the time, and so on."""
    router_urls: tuple[RouterUrl, ...] = Field(default=(), strict=False)
    """Admin ports of all routers, which say how long requests wait: http://host:8001 of one;
    dns:name:8001 for one at every address of a name. Empty: the router of these settings."""
    api_key_file: str = ""
    """File with an API key that may observe, where routers have keys (disagg keys create --scope
    observe)."""

    @property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """Fewest and most by role, of those that are scaled; none: the mode is off."""
        given = {"prefill": self.prefill, "decode": self.decode, "both": self.both}
        return {role: parse_range(text) for role, text in given.items() if text}
