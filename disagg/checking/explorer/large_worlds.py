"""The worlds that are too large for `make test`: as in `small_worlds`."""

from dataclasses import replace
from functools import partial

from disagg.checking.explorer.setting import EVERY_WAIT, LONG_PROMPT, TWO_TOKENS, Request
from disagg.checking.explorer.small_worlds import (
    BOTH,
    DECODE,
    GROWING,
    LONGER,
    MUTUAL,
    OLDER,
    PREFILL,
    SMALL_WORLDS,
    Named,
    at_any_time,
    chain,
    drain,
    lease,
    lending,
    mutual,
    pair,
    planned,
    take_over,
)

_SHARED = pair(requests=(Request(),) * 2, delivery="in order", any_order=True)
_THREE = (*MUTUAL.requests, Request(0, 1, (30,)))
_LONG_LOCAL = (Request(0, 0, (30, 31, 32, 33), 1), Request(1, 1, (40, 41, 42, 43), 1))
_shared = partial(replace, _SHARED)


def _third(role: str) -> dict[str, tuple[str, ...]]:
    return {"workers": ("prefill", "decode", "second"), "roles": ("prefill", "decode", role)}


LARGE_WORLDS: dict[str, Named] = {
    "routers-hand-overs": (
        "two routers, each with a hand-over of the same name; one of them is gone for ever, "
        "and the other's is served",
        replace(
            SMALL_WORLDS["routers"][-1],
            requests=(Request(prompt=(5,), router="A"), Request(prompt=(8,), router="B")),
            routers_vanish=("A",),
        ),
    ),
    "lease-retry": (
        "abort or death, and a second lease with the same block ids and other bytes",
        lease(tries=2, repeats=False),
    ),
    "pair-growing": (
        "blocks of two tokens, a chunk ends within one; the prefill is preempted, eviction",
        pair(
            specs=(TWO_TOKENS,), requests=(Request(prompt=LONG_PROMPT),), preemptions=1, evictions=1
        ),
    ),
    "pair-limits": (
        "two hand-overs, and each worker takes one sequence and lets one wait",
        pair(
            requests=(Request(), Request(prompt=(8, 9))),
            num_blocks=7,
            max_sequences=1,
            max_waiting=1,
            delivery="in order",
            any_order=True,
        ),
    ),
    "mutual-growing": (
        "decodes outgrow their reservations and preempt prefills",
        mutual(requests=GROWING, num_blocks=6),
    ),
    "pair-ranks-cancel": ("two ranks; the client goes away", pair(num_ranks=2, cancels=1)),
    "pair-time-outs": (
        "requests to peers, leases, reservations and READs time out at any moment",
        pair(time_outs=EVERY_WAIT),
    ),
    "pair-losses": ("a message is lost for good, the client goes away", pair(losses=1, cancels=1)),
    "pair-losses-time-outs": (
        "a message is lost for good; requests to peers, leases, reservations and READs time out "
        "at any moment; a refused prefill is not tried again",
        pair(losses=1, passes_max=0, time_outs=EVERY_WAIT),
    ),
    "pair-vanishes-time-outs": (
        "either worker is gone for ever; everything times out at any moment",
        pair(vanishes=BOTH, time_outs=EVERY_WAIT),
    ),
    "pair-strangers-repeated": (
        "every message repeated and reordered, and also from a wrong epoch",
        pair(delivery="repeated", wrong_epochs=True),
    ),
    "pair-cancel-repeated": (
        "every message repeated and reordered; the client goes away",
        pair(delivery="repeated", cancels=1),
    ),
    "pair-preempt-repeated": (
        "every message repeated and reordered; the prefill is preempted",
        pair(delivery="repeated", preemptions=1),
    ),
    "pair-decode-restarts": (
        "every message repeated and reordered; the decode worker restarts",
        pair(delivery="repeated", crashes=(DECODE,), returns=True),
    ),
    "pair-prefill-restarts": (
        "every message repeated and reordered; the prefill worker restarts",
        pair(delivery="repeated", crashes=(PREFILL,), returns=True),
    ),
    "pair-shared-more": (
        "two hand-overs lease the same block, with memory for both and refusals retried",
        _shared(num_blocks=7),
    ),
    "pair-growing-shared": (
        "blocks of two tokens, two hand-overs of the same prompt",
        _shared(specs=(TWO_TOKENS,), requests=(Request(prompt=LONG_PROMPT),) * 2, num_blocks=7),
    ),
    "mutual-roomy": ("one block more", mutual(num_blocks=6)),
    "mutual-preempt": ("a prefill is preempted while its lease grows", mutual(preemptions=1)),
    "mutual-older": (
        "a request that lost its memory is overtaken by nobody",
        mutual(requests=OLDER, num_blocks=6, starved_by=1),
    ),
    "mutual-three": (
        "and a third hand-over; it may be given up",
        mutual(requests=_THREE, served=False),
    ),
    "mutual-three-at-once": (
        "three hand-overs, all submitted before anything else happens; each is refused up to three "
        "times",
        mutual(requests=_THREE, at_once=True, passes_max=2),
    ),
    "mutual-older-more": (
        "by nobody of three",
        mutual(requests=(*OLDER, Request(0, 1, (40,))), num_blocks=6, starved_by=1),
    ),
    "mutual-queue": (
        "both prefills are preempted and queue behind longer prompts",
        mutual(
            requests=(*MUTUAL.requests, *_LONG_LOCAL), num_blocks=6, at_once=True, preemptions=2
        ),
    ),
    "mutual-growing-retries": (
        "decodes outgrow their reservations and preempt prefills, which are refused up to three "
        "times",
        mutual(requests=GROWING, num_blocks=6, passes_max=2),
    ),
    "take-over-cut": (
        "D lives on, but its link to P is cut, and so is its session",
        take_over(crashes=(), cuts=(DECODE,), unlinked=((PREFILL, DECODE),)),
    ),
    "chain-repeated": ("every message repeated and reordered", chain(delivery="repeated")),
    "chain-time-outs": (
        "requests for leases and reservations time out at any moment",
        chain(time_outs=("request",)),
    ),
    "take-over-cancel": ("the client goes away; eviction", take_over(cancels=1, evictions=1)),
    "take-over-repeated": ("every message repeated and reordered", take_over(delivery="repeated")),
    "take-over-time-outs": (
        "requests to peers and leases time out at any moment",
        take_over(time_outs=("request", "lease")),
    ),
    "take-over-cut-strangers": (
        "every message also from a wrong epoch; D lives on, cut off",
        take_over(crashes=(), cuts=(DECODE,), unlinked=((PREFILL, DECODE),), wrong_epochs=True),
    ),
    "tier-reset-again": (
        "two resets; a block does not come whole, a client goes away; eviction",
        replace(SMALL_WORLDS["tier-reset"][-1], resets=2, tier_losses=1, cancels=1),
    ),
    "lending-losses": (
        "a message is lost for good; every message also from a wrong epoch",
        lending(losses=1, wrong_epochs=True),
    ),
    "generation-take-over": (
        "D crashes, E takes the lease over or is planned anew",
        planned(**_third("decode"), crashes=(DECODE,), generations_max=4),
    ),
    "generation-read-error-evict": (
        "a READ fails, everything free is evicted; three tokens; at any time",
        at_any_time(requests=LONGER, read_errors=1, evictions=1),
    ),
    "generation-session-evict": (
        "D's session breaks, everything free is evicted",
        planned(cuts=(DECODE,), evictions=1),
    ),
    "generation-step-error-crash": (
        "a step fails, P crashes, and may come back",
        planned(step_errors=1, crashes=(PREFILL,), returns=True, generations_max=4),
    ),
    "generation-prefill-crash-more": (
        "P crashes, and may come back; three tokens; at any time",
        at_any_time(requests=LONGER, crashes=(PREFILL,), returns=True),
    ),
    "generation-prefill-second": (
        "P crashes, E prefills again for the same D",
        planned(**_third("prefill"), crashes=(PREFILL,), passes_max=1),
    ),
    "generation-decode-second": (
        "P's request for a reservation times out, E decodes; at any time",
        at_any_time(**_third("decode"), time_outs=("request",), num_time_outs=1),
    ),
    "generation-take-over-more": (
        "D crashes, E takes over; at any time",
        at_any_time(**_third("decode"), crashes=(DECODE,), generations_max=4),
    ),
    "generation-take-over-errors": (
        "and a READ fails",
        planned(**_third("decode"), crashes=(DECODE,), generations_max=4, read_errors=1),
    ),
    "generation-sessions": (
        "both sessions break, each once; an error is allowed",
        planned(cuts=BOTH, error_allowed=True),
    ),
    "generation-session-error": (
        "P's session breaks, a READ fails",
        planned(cuts=(PREFILL,), read_errors=1),
    ),
    "drain-cancel": (
        "the client goes away, everything free is evicted",
        drain(cancels=1, evictions=1),
    ),
    "drain-decode": (
        "P prefills for D, which may be asked to end, and E takes over; in order",
        planned(
            **_third("decode"),
            requests=LONGER,
            specs=(TWO_TOKENS,),
            drains=(DECODE,),
            generations_max=4,
        ),
    ),
    "drain-prefill": (
        "P prefills for D and may be asked to end, E prefills again; blocks of one token; in order",
        planned(**_third("prefill"), drains=(PREFILL,), generations_max=4),
    ),
    "generation-stalled-prefill": (
        "a report of P or D says that a step does not end, which may end all the same",
        planned(stalls=1),
    ),
    "generation-both-crash": (
        "P and D crash, and may come back; an error is allowed",
        planned(crashes=BOTH, returns=True, error_allowed=True),
    ),
    "generation-crash-cancel": (
        "P crashes, and may come back; the client goes away; at any time",
        planned(crashes=(PREFILL,), returns=True, cancels=1, delivery="once"),
    ),
}

WORLDS = SMALL_WORLDS | LARGE_WORLDS
