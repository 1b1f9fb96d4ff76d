"""Lengths of prompts for measurements: users' prompts have all lengths, and seldom one twice."""

import random

SHARE, TOKENS_MIN = 1 / 16, 8
"""How far lengths are from the one that is meant, at most: a share of it, or so many tokens."""


def varied_length(num_tokens: int, number: int, repeats: int) -> int:
    """A length near another one, for one of several measurements of which the median counts.

    Engines that have computed a length before compute it faster: they find its kernels and its
    memory. So each measurement takes another length, the first ones shorter and the last ones
    longer, by chance within its own part of the span: the middle ones are about as long as meant.

    Args:
        num_tokens: the length that is meant.
        number: of this measurement, from 0 on.
        repeats: measurements in all.
    """
    most = min(max(int(num_tokens * SHARE), TOKENS_MIN), num_tokens // 2)
    place = (number + random.random()) / repeats
    return num_tokens + round(most * (2 * place - 1))
