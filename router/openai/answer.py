"""What the answers of all endpoints have alike."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from disagg.errors import DisaggError
from disagg.router.openai.shown_prompt import ShownPrompt
from disagg.router.openai.sse import to_json
from disagg.router.text_stream import Piece
from disagg.router.tokenizer import Tokenizer


@dataclass(slots=True)
class Answer:
    """What an answer of either kind collects while pieces arrive."""

    response_id: str
    created: int
    model: str
    tokenizer: Tokenizer
    prompt: ShownPrompt = field(repr=False)
    with_usage_field: bool = False
    """Streams that end with a usage chunk carry ``usage: null`` until then."""
    texts: list[str] = field(default_factory=list, repr=False)
    num_tokens: int = 0
    finish_reason: str = ""

    def count(self, piece: Piece) -> None:
        """Add a piece's tokens to the usage."""
        self.num_tokens += len(piece.token_ids)
        self.finish_reason = piece.finish_reason
        self.prompt.take(piece)

    def frame(self, kind: str) -> dict[str, Any]:
        """The fields every body and chunk begins with."""
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
        }

    def chunk_frame(self, kind: str) -> tuple[bytes, bytes]:
        """The bytes before and after a chunk's only choice."""
        head = b"data: " + to_json(self.frame(kind))[:-1] + b',"choices":[{"index":0,'
        return head, b'}],"usage":null}\n\n' if self.with_usage_field else b"}]}\n\n"


class Format(Protocol):
    """How one endpoint shows pieces.

    Attributes:
        done: what ends a stream that is complete.
    """

    done: bytes

    def first_chunk(self) -> bytes:
        """What a stream begins with, if anything."""

    def chunk(self, piece: Piece) -> bytes:
        """The SSE bytes of a piece; empty when there is nothing to show."""

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The last chunk of a stream with ``include_usage``."""

    def error_chunk(self, error: DisaggError) -> bytes:
        """The last chunk of a stream that is not complete."""

    def add(self, piece: Piece) -> None:
        """Collect a piece of an answer that is not streamed."""

    def body(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The whole answer."""
