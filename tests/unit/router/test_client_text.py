"""What clients write: which ids may be logged and echoed, and how much of a text is told."""

import pytest

from disagg.router.client_text import SHOWN_CHARS_MAX, clip, usable_as_request_id


@pytest.mark.parametrize(
    "given", ["a", "0" * 128, "Root=1-67891233-abcdef", "a/b", "chatcmpl:x+y=@|~,;-_."]
)
def test_ids_of_proxies_are_kept(given):
    assert usable_as_request_id(given)


@pytest.mark.parametrize("given", ["", "0" * 129, "a b", "a\n", 'a"', "ä", "%0a"])
def test_what_could_break_a_log_or_a_header_is_not(given):
    assert not usable_as_request_id(given)


def test_an_error_tells_the_beginning_of_a_long_text():
    assert clip("x" * SHOWN_CHARS_MAX) == "x" * SHOWN_CHARS_MAX
    assert clip("x" * 10_000) == "x" * SHOWN_CHARS_MAX + "…"
