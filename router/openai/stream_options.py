"""The ``stream_options`` of a request."""

from disagg.router.openai.body import Strict


class StreamOptions(Strict):
    """What a stream has besides the answer."""

    include_usage: bool | None = None
    """It ends with the usage."""
    continuous_usage_stats: bool | None = None
    """Every chunk has its choice's usage so far; without ``include_usage`` it does nothing."""
    include_obfuscation: bool | None = None
    """Ignored: chunks are never padded."""
