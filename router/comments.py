"""Comments in a stream that waits for its first token, so that no proxy takes it for dead."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

COMMENT = b": waiting\n\n"
"""What begins with a colon is passed over by readers of server-sent events."""


async def commented(
    first: Awaitable[T], comment: Callable[[bytes], Awaitable[None]], every_ms: int
) -> T:
    """What is waited for; meanwhile a comment is sent each ``every_ms``, or none for 0."""
    if not every_ms:
        return await first
    waiting = asyncio.ensure_future(first)
    try:
        while not waiting.done():
            ended, _ = await asyncio.wait([waiting], timeout=every_ms / 1000)
            if not ended:
                await comment(COMMENT)
        return waiting.result()
    finally:
        waiting.cancel()
        # It may not run any more when what it reads from is closed.
        await asyncio.wait([waiting])
