"""What a chat template may take: what it writes is counted, and one that does not end is stopped.

A single expression is not interrupted, and a value that it keeps is not measured: a template is
still one of a checkpoint that is trusted.
"""

import threading
import time
from collections.abc import Iterable
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.runtime import Context

from disagg.errors import RequestError

SECONDS_MAX = 5.0
"""Of the processor, for one prompt; 65,536 messages take a template a second."""
CHARS_MAX = 8 << 20
"""As limits.prompt_bytes_max, by default."""
_LOOK = "look_at_bounds"


class BoundError(RequestError):
    """A template takes more than it may."""


class _Bounds(threading.local):
    """Of what this thread renders."""

    ends_s = 0.0
    chars_max = 0


_bounds = _Bounds()


def begin(chars_max: int) -> None:
    """From now on what this thread renders has `SECONDS_MAX`, and may write so many characters."""
    _bounds.ends_s = time.thread_time() + SECONDS_MAX
    _bounds.chars_max = chars_max


def bound(template: Template, text: str) -> None:
    """Have a compiled template look at what it has taken wherever it goes round, see `begin`.

    Args:
        template: in an environment of its own, as transformers keeps it; it is changed.
        text: that it was compiled from.
    """
    environment = template.environment
    if _LOOK in environment.filters:
        return
    environment.filters[_LOOK] = _look
    environment.concat = _joined  # type: ignore[method-assign]
    tree = environment.parse(text)
    # What could go round for ever: loops, macros and blocks that call themselves.
    rounds: Any = tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block))
    for node in rounds:
        call = nodes.Filter(nodes.Const(None), _LOOK, [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
    # Each time they are copied, and Jinja's ChainMap of them takes longer than the template.
    template.globals = dict(template.globals)
    template.globals.pop("lipsum", None)  # writes as much as it is asked for, in one call
    looking = Template.from_code(environment, environment.compile(tree), template.globals)
    template.root_render_func, template.blocks = looking.root_render_func, looking.blocks


@pass_context  # else Jinja would call it once, when it compiles
def _look(context: Context, value: None) -> None:
    if time.thread_time() > _bounds.ends_s:
        raise BoundError(
            f"the chat template does not end, within {SECONDS_MAX:g} s of computing",
            param="messages",
        )


def _joined(pieces: Iterable[str]) -> str:
    left, kept = _bounds.chars_max, []
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise BoundError(
                f"the chat template writes more than {_bounds.chars_max} characters "
                "(limits.prompt_bytes_max)",
                param="messages",
            )
        kept.append(piece)
    return "".join(kept)
