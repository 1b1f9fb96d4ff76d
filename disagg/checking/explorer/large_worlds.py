"""The worlds that are too large for `make test`."""

from dataclasses import replace

from disagg.checking.explorer.lease_world import LeaseSetting
from disagg.checking.explorer.named_world import NamedWorld
from disagg.checking.explorer.setting import EVERY_WAIT, LONG_PROMPT, TWO_TOKENS, Request, Setting
from disagg.checking.explorer.small_worlds import (
    AT_ANY_TIME,
    BOTH,
    CHAIN,
    DECODE,
    GROWING,
    LONGER,
    MUTUAL,
    OLDER,
    PAIR,
    PLANNED,
    PREFILL,
    TAKE_OVER,
)

_THREE = ("prefill", "decode", "second")
_SHARED = replace(PAIR, requests=(Request(),) * 2, delivery="in order", any_order=True)
_LONG_LOCAL = (Request(0, 0, (30, 31, 32, 33), 1), Request(1, 1, (40, 41, 42, 43), 1))


def _with_third(setting: Setting, role: str) -> Setting:
    return replace(setting, workers=_THREE, roles=("prefill", "decode", role))


LARGE_WORLDS = (
    NamedWorld(
        "lease-ranks-repeated",
        "two ranks; everything repeated; READ errors and stuck READs",
        LeaseSetting(num_read_errors=1, stuck=True, num_ranks=2),
    ),
    NamedWorld(
        "pair-time-outs",
        "questions, leases, reservations and READs time out at any moment",
        replace(PAIR, time_outs=EVERY_WAIT),
    ),
    NamedWorld(
        "pair-losses",
        "a message is lost for good, the client goes away",
        replace(PAIR, losses=1, cancels=1),
    ),
    NamedWorld(
        "pair-losses-time-outs",
        "a message is lost for good; questions, leases, reservations and READs time out at any "
        "moment; a refused prefill is not tried again",
        replace(PAIR, losses=1, passes_max=0, time_outs=EVERY_WAIT),
    ),
    NamedWorld(
        "pair-vanishes-time-outs",
        "either worker is gone for ever; everything times out at any moment",
        replace(PAIR, vanishes=BOTH, time_outs=EVERY_WAIT),
    ),
    NamedWorld(
        "pair-strangers-repeated",
        "every message repeated and reordered, and also from a wrong epoch",
        replace(PAIR, delivery="repeated", wrong_epochs=True),
    ),
    NamedWorld(
        "pair-cancel-repeated",
        "every message repeated and reordered; the client goes away",
        replace(PAIR, delivery="repeated", cancels=1),
    ),
    NamedWorld(
        "pair-preempt-repeated",
        "every message repeated and reordered; the prefill is preempted",
        replace(PAIR, delivery="repeated", preemptions=1),
    ),
    NamedWorld(
        "pair-decode-restarts",
        "every message repeated and reordered; the decode worker restarts",
        replace(PAIR, delivery="repeated", crashes=(DECODE,), returns=True),
    ),
    NamedWorld(
        "pair-prefill-restarts",
        "every message repeated and reordered; the prefill worker restarts",
        replace(PAIR, delivery="repeated", crashes=(PREFILL,), returns=True),
    ),
    NamedWorld(
        "pair-shared-more",
        "two hand-overs lease the same block, with memory for both and refusals retried",
        replace(_SHARED, num_blocks=7),
    ),
    NamedWorld(
        "pair-growing-shared",
        "blocks of two tokens, two hand-overs of the same prompt",
        replace(
            _SHARED,
            specs=(TWO_TOKENS,),
            requests=(Request(prompt=LONG_PROMPT),) * 2,
            num_blocks=7,
        ),
    ),
    NamedWorld(
        "mutual-three",
        "and a third hand-over",
        replace(MUTUAL, requests=(*MUTUAL.requests, Request(0, 1, (30,)))),
    ),
    NamedWorld(
        "mutual-older-more",
        "by nobody of three",
        replace(MUTUAL, requests=(*OLDER, Request(0, 1, (40,))), num_blocks=6, starved_by=1),
    ),
    NamedWorld(
        "mutual-queue",
        "both prefills are preempted and queue behind longer prompts",
        replace(
            MUTUAL,
            requests=(*MUTUAL.requests, *_LONG_LOCAL),
            num_blocks=6,
            at_once=True,
            preemptions=2,
        ),
    ),
    NamedWorld(
        "mutual-growing-retries",
        "decodes outgrow their reservations and preempt prefills, which are refused up to three "
        "times",
        replace(MUTUAL, requests=GROWING, num_blocks=6, passes_max=2),
    ),
    NamedWorld(
        "take-over-cut",
        "D lives on, but its link to P is cut, and so is its session",
        replace(TAKE_OVER, crashes=(), cuts=(DECODE,), unlinked=((PREFILL, DECODE),)),
    ),
    NamedWorld(
        "chain-repeated",
        "every message repeated and reordered",
        replace(CHAIN, delivery="repeated"),
    ),
    NamedWorld(
        "chain-time-outs",
        "questions time out at any moment",
        replace(CHAIN, time_outs=("question",)),
    ),
    NamedWorld(
        "take-over-cancel",
        "the client goes away; eviction",
        replace(TAKE_OVER, cancels=1, evictions=1),
    ),
    NamedWorld(
        "take-over-repeated",
        "every message repeated and reordered",
        replace(TAKE_OVER, delivery="repeated"),
    ),
    NamedWorld(
        "take-over-time-outs",
        "questions and leases time out at any moment",
        replace(TAKE_OVER, time_outs=("question", "lease")),
    ),
    NamedWorld(
        "take-over-cut-strangers",
        "every message also from a wrong epoch; D lives on, cut off",
        replace(
            TAKE_OVER,
            crashes=(),
            cuts=(DECODE,),
            unlinked=((PREFILL, DECODE),),
            wrong_epochs=True,
        ),
    ),
    NamedWorld(
        "generation-take-over",
        "D crashes, E takes the lease over or is planned anew",
        replace(_with_third(PLANNED, "decode"), crashes=(DECODE,), generations_max=4),
    ),
    NamedWorld(
        "generation-read-error-evict",
        "a READ fails, everything free is evicted; three tokens; at any time",
        replace(AT_ANY_TIME, requests=LONGER, read_errors=1, evictions=1),
    ),
    NamedWorld(
        "generation-session-evict",
        "D's session breaks, everything free is evicted",
        replace(PLANNED, cuts=(DECODE,), evictions=1),
    ),
    NamedWorld(
        "generation-step-error-crash",
        "a step fails, P crashes, and may come back",
        replace(PLANNED, step_errors=1, crashes=(PREFILL,), returns=True, generations_max=4),
    ),
    NamedWorld(
        "generation-prefill-crash-more",
        "P crashes, and may come back; three tokens; at any time",
        replace(AT_ANY_TIME, requests=LONGER, crashes=(PREFILL,), returns=True),
    ),
    NamedWorld(
        "generation-prefill-second",
        "P crashes, E prefills again for the same D",
        replace(_with_third(PLANNED, "prefill"), crashes=(PREFILL,), passes_max=1),
    ),
    NamedWorld(
        "generation-decode-second",
        "P's question times out, E decodes; at any time",
        replace(_with_third(AT_ANY_TIME, "decode"), time_outs=("question",), num_time_outs=1),
    ),
    NamedWorld(
        "generation-take-over-more",
        "D crashes, E takes over; at any time",
        replace(_with_third(AT_ANY_TIME, "decode"), crashes=(DECODE,), generations_max=4),
    ),
    NamedWorld(
        "generation-take-over-errors",
        "and a READ fails",
        replace(
            _with_third(PLANNED, "decode"), crashes=(DECODE,), generations_max=4, read_errors=1
        ),
    ),
    NamedWorld(
        "generation-sessions",
        "both sessions break, each once; an error is allowed",
        replace(PLANNED, cuts=BOTH, error_allowed=True),
    ),
    NamedWorld(
        "generation-session-error",
        "P's session breaks, a READ fails",
        replace(PLANNED, cuts=(PREFILL,), read_errors=1),
    ),
    NamedWorld(
        "generation-both-crash",
        "P and D crash, and may come back; an error is allowed",
        replace(PLANNED, crashes=BOTH, returns=True, error_allowed=True),
    ),
    NamedWorld(
        "generation-crash-cancel",
        "P crashes, and may come back; the client goes away; at any time",
        replace(PLANNED, crashes=(PREFILL,), returns=True, cancels=1, delivery="once"),
    ),
)
