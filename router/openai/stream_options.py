"""The ``stream_options`` of a request."""

from disagg.router.openai.body import Strict


class StreamOptions(Strict):
    """What a stream has besides the answer: whether it ends with the usage."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Ignored: chunks are never padded."""
