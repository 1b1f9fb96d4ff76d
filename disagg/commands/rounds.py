"""Repeats of a measurement, and how long the rest of them takes."""

import time
from collections.abc import Callable, Iterator

Say = Callable[[str], None]


def rounds(what: str, repeats: int, say: Say) -> Iterator[int]:
    """Numbers of the repeats; says which one begins, and how long the rest takes by those before.

    Args:
        what: is measured.
        repeats: of it.
        say: told of each.
    """
    began_s = time.perf_counter()
    for number in range(repeats):
        left = ""
        if number:
            left_s = (time.perf_counter() - began_s) / number * (repeats - number)
            left = f", {left_s:.0f} s left"
        say(f"{what}: {number + 1} of {repeats}{left}")
        yield number
