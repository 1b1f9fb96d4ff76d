"""Tokens to text, one at a time, such that the pieces join to one decode of all tokens.

**The text of a continuation** is what ``decode(prompt + continuation)`` has after the part it has
in common with ``decode(prompt)``, special tokens left out of both. So a prompt and its text join to
what the model read and wrote: a first word keeps its leading space, unless nothing visible stands
before it and the decoder strips the start of a text. vLLM continues the prompt's text too. A
character of several tokens that the prompt begins belongs to the continuation.

A piece is final once shown, so it is held back as long as a later token could change it:

- ``ByteLevel`` decodes all bytes as one UTF-8 text: a character waits for its last byte.
- ``ByteFallback`` decodes a run of byte tokens as a whole: one bad byte turns every byte of the run
  into a replacement character. The run waits for its end.
- A decoder that rewrites text across tokens (a ``Replace`` of words after ``Fuse``) can change
  anything: all text waits for the end. No model we know of has one.
"""

import codecs
import json
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, Protocol

_Utf8 = codecs.getincrementaldecoder("utf-8")
REPLACEMENT = "\ufffd"
UTF8_BYTES_MAX = 4
WINDOW_TOKENS_MAX = 6
"""Where neighbours matter, settled tokens decoded at once; more cost time, fewer are cut often."""


class Detokenizer(Protocol):
    """Turns the token ids of one continuation into its text."""

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is final now; often none, sometimes more."""

    def finish(self) -> str:
        """Return the text held back, once no more tokens come."""


class Vocabulary:
    """What the tokens of one tokenizer stand for, alone and after each other.

    Attributes:
        neighbours_matter: a token's text depends on the one before it: ``CTC`` drops repetitions,
            ``BPEDecoder`` puts a space behind a word only when something follows.
        texts: of tokens whose text nothing before or behind them changes, as they are used: where
            neighbours do not matter, settled ones that are not the first; in bytes, those of
            whole characters that stand where no character has begun.
    """

    def __init__(self, backend: Any, shown_special: frozenset[str] = frozenset()) -> None:
        """Take a ``tokenizers.Tokenizer``; it is not changed.

        Special tokens have no text, but for those in ``shown_special``.
        """
        self._backend = backend
        added = backend.get_added_tokens_decoder().values()
        special = frozenset(token.content for token in added if token.special)
        self._special = special - shown_special
        self._all_are_left_out = self._special == special
        decoder = backend.decoder
        steps = _steps(json.loads(decoder.__getstate__())) if decoder is not None else []
        kinds = [step["type"] for step in steps]
        self._byte_of = _byte_alphabet() if "ByteLevel" in kinds else None
        self._only_byte_level = kinds == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in kinds
        self._rewrites = _rewrites_across_tokens(steps)
        self.neighbours_matter = not {"BPEDecoder", "CTC"}.isdisjoint(kinds)
        self.texts: dict[int, str] = {}
        self._bytes: dict[int, bytes] = {}
        self._shown_bytes: dict[int, bytes] = {}
        self._settled: dict[int, bool] = {}

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""
        if not self._all_are_left_out:
            token_ids = [token_id for token_id in token_ids if self.shows(token_id)]
        return str(self._backend.decode(token_ids, skip_special_tokens=self._all_are_left_out))

    def shows(self, token_id: int) -> bool:
        """Whether a token takes part in a text at all: it exists and is not special."""
        piece = self._backend.id_to_token(token_id)
        return piece is not None and piece not in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, special tokens by name; empty for an unused id."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._bytes_of(token_id)
        return known

    def shown_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds to a text; none for a special one."""
        known = self._shown_bytes.get(token_id)
        if known is None:
            known = self.token_bytes(token_id) if self.shows(token_id) else b""
            self._shown_bytes[token_id] = known
        return known

    def settled(self, token_id: int) -> bool:
        """Whether text that ends with this token, which shows, stays as it is for ever."""
        known = self._settled.get(token_id)
        if known is None:
            known = self._settled[token_id] = not (
                self._rewrites
                or (self._byte_fallback and _byte(self._backend.id_to_token(token_id)) is not None)
                or (self._byte_of is not None and self.decode([token_id]).endswith(REPLACEMENT))
            )
        return known

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        """Start the text that continues a prompt."""
        if self._only_byte_level:
            return _ByteLevelDetokenizer(self, prompt)
        return _WindowDetokenizer(self, prompt)

    def _bytes_of(self, token_id: int) -> bytes:
        piece: str | None = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if piece in self._special:
            return piece.encode()
        if self._byte_of is not None:
            if all(char in self._byte_of for char in piece):
                return bytes(self._byte_of[char] for char in piece)
            return piece.encode()
        byte = _byte(piece)
        return piece.replace("\u2581", " ").encode() if byte is None else bytes([byte])


class _ByteLevelDetokenizer:
    """Bytes by table, characters by an incremental UTF-8 decoder, which holds at most 3 bytes."""

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._utf8 = _Utf8("replace")
        tail = b""
        for token_id in reversed(prompt):
            tail = vocabulary.shown_bytes(token_id) + tail
            if tail and (tail[-1] < 0x80 or len(tail) >= UTF8_BYTES_MAX):
                break  # no character that begins before it goes on behind it
        self._utf8.decode(tail)
        self._holds = self._utf8.getstate()[0] != b""
        """Bytes of a character that is not whole."""
        # The prompt's own text already has a replacement character for its unfinished one.
        self._replaced_in_prompt = self._holds

    def push(self, token_id: int) -> str:
        """Add a token and return the characters it completes."""
        texts = self._vocabulary.texts
        held = self._holds
        if not held:
            known = texts.get(token_id)
            if known is not None:
                return known
        text = self._text(self._utf8.decode(self._vocabulary.shown_bytes(token_id)))
        self._holds = self._utf8.getstate()[0] != b""
        if not (held or self._holds):
            texts[token_id] = text
        return text

    def finish(self) -> str:
        """Return the replacement character of a character that stays unfinished."""
        return self._text(self._utf8.decode(b"", final=True))

    def _text(self, text: str) -> str:
        if self._replaced_in_prompt and text:
            self._replaced_in_prompt = False
            return text.removeprefix(REPLACEMENT)
        return text


class _WindowDetokenizer:
    """Decodes a window that ends with the new token; its growth is the new text.

    A decoder treats a token by whether it is the first of the text (``Metaspace``, ``WordPiece``;
    ``Strip`` up to its count of characters). So the window begins with tokens whose text is
    visible, the head, behind which nothing is first any more. Held tokens stay in the window and
    are decoded once, when a settled one follows. A settled token leaves it, after the next where
    neighbours matter: work per token does not grow.
    """

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        tail: list[int] = []
        for token_id in reversed(prompt):
            if vocabulary.shows(token_id):
                tail.append(token_id)
                if vocabulary.settled(token_id) and vocabulary.decode([token_id]):
                    break
        self._window = tail[::-1]
        self._shown = vocabulary.decode(self._window)
        """What the window's text began with when text was last returned."""
        self._head: list[int] = []
        self._head_text = ""
        self._only_head = False
        """The window is the head alone, so the next token's text is that after any other."""

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is final now; a special token changes nothing."""
        vocabulary = self._vocabulary
        if self._only_head:
            known = vocabulary.texts.get(token_id)
            if known is not None:
                return known
        if not vocabulary.shows(token_id):
            return ""
        self._window.append(token_id)
        if not vocabulary.settled(token_id):
            self._only_head = False
            return ""
        new = self._grown()
        if self._only_head:
            vocabulary.texts[token_id] = new
        self._cut()
        return new

    def finish(self) -> str:
        """Return the text of held tokens."""
        return self._grown()

    def _grown(self) -> str:
        text, shown = self._vocabulary.decode(self._window), self._shown
        self._shown = text
        if not text.startswith(shown):  # only where held tokens follow a prompt's
            pairs = zip(shown, text, strict=False)
            shown = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return text[len(shown) :]

    def _cut(self) -> None:
        """Let settled tokens leave the window."""
        decode, window = self._vocabulary.decode, self._window
        if not self._head and self._shown:
            num = next(n for n in range(1, len(window) + 1) if decode(window[-n:]))
            self._head, self._head_text = window[-num:], decode(window[-num:])
        if self._head and not self._vocabulary.neighbours_matter:
            self._window, self._shown, self._only_head = [*self._head], self._head_text, True
        elif len(window) > WINDOW_TOKENS_MAX:
            # Where all is invisible so far, that a token was first is all that counts.
            self._window = [*(self._head or window[:1]), window[-1]]
            self._shown = decode(self._window)


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """A decoder's description as a flat list of its steps."""
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _steps(part)]


def _rewrites_across_tokens(steps: Iterable[dict[str, Any]]) -> bool:
    """Whether a step may change text because of what comes after it, byte runs apart.

    After ``Fuse`` or ``ByteLevel`` the text is one piece, on which only what concerns its start or
    single characters is harmless. ``BPEDecoder`` treats the last token otherwise, which is
    harmless unless a step looks at the difference.
    """
    fused = last_differs = False
    for step in steps:
        match step["type"]:
            case "Fuse":
                fused = True
            case "Metaspace" if not last_differs:
                pass
            case "Replace" if not last_differs:
                if fused and len(step["pattern"].get("String", "")) != 1:
                    return True
            case "Strip" if not last_differs:
                if fused and step["stop"]:
                    return True
            case "WordPiece" | "CTC" | "ByteFallback" if not fused and not last_differs:
                pass
            case "ByteLevel" if not fused and not last_differs:
                fused = True
            case "BPEDecoder" if not fused and not last_differs:
                last_differs = True
            case _:
                return True
    return False


def _byte(piece: str) -> int | None:
    """The byte that ``ByteFallback`` sees in a token such as ``<0x0A>``."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return int(piece[3:5], 16)
        except ValueError:
            return None
    return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, inverted (the ByteLevel decoder's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table
