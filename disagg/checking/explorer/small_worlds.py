"""The worlds that `make test` exhausts: what may happen in each, and its setting."""

from dataclasses import replace
from functools import partial

from disagg.checking.explorer.setting import (
    EVERY_WAIT,
    FULL,
    LONG_PROMPT,
    TWO_TOKENS,
    WINDOW,
    WINDOW_OF_TWO,
    Request,
    Setting,
)

PREFILL, DECODE, THIRD = range(3)
BOTH = (PREFILL, DECODE)

LEASE = Setting(
    workers=("owner", "reader"),
    requests=(),
    tables_alone=True,
    num_blocks=3,
    delivery="repeated",
    time_outs=("lease",),
)
"""One generation over the tables alone: one group, two blocks."""
PAIR = Setting()
"""One hand-over between two workers: a prompt of two blocks in two chunks, one block per READ."""
CHAIN = Setting(
    workers=("cache", "prefill", "decode"),
    requests=(Request(1, 2, pull_from=0),),
    cached_at=(0,),
)
"""C has the prompt's first block cached, P pulls it and prefills the rest, D decodes."""
TAKE_OVER = Setting(
    workers=("prefill", "decode", "second"),
    requests=(Request(0, 1, taken_over_by=2),),
    crashes=(DECODE,),
)
"""P prefills for D, which is lost, and E takes the lease over."""
MUTUAL = Setting(
    workers=("left", "right"),
    requests=(Request(0, 1, (10, 11)), Request(1, 0, (20, 21))),
    delivery="in order",
    whole_reads=True,
    served=True,
)
"""Two hand-overs, one each way, with memory for one of them."""
TIER = Setting(
    workers=("one",),
    requests=(Request(0, 0, LONG_PROMPT, 1),) * 2,
    tier="publish",
)
"""One worker with a tier serves the same prompt twice; each copy has one block."""
LENDING = Setting(
    workers=("cache", "prefill"),
    requests=(Request(1, 1, max_tokens=1, pull_from=0),),
    tier="publish",
    stored=True,
)
"""C has the prompt in its tier only, P pulls its first block from there and computes the rest."""
ONE_BLOCK = (Request(prompt=(5,)),)
SHORT = Request(0, 0, max_tokens=1)
PULLS_TWO = Request(1, 1, LONG_PROMPT, 1, pull_from=0)
GROWING = (Request(0, 1, (10, 11), 3), Request(1, 0, (20, 21), 3))
OLDER = (Request(1, 1, (10, 11), 3), Request(0, 1, (20,)), Request(0, 1, (30,)))
PLANNED = Setting(
    roles=("prefill", "decode"),
    num_blocks=6,
    passes_max=0,
    delivery="in order",
    whole_reads=True,
)
"""One request that the router's core plans, and plans anew."""
AT_ANY_TIME = replace(PLANNED, delivery="once", whole_reads=False)
LONGER = (Request(max_tokens=3),)
DRAIN = replace(
    AT_ANY_TIME,
    workers=("decode", "second"),
    roles=("decode", "decode"),
    requests=LONGER,
    specs=(TWO_TOKENS,),
    drains=(0,),
)
"""D serves alone, may be asked to end, and moves what it decodes to E; blocks of two tokens."""

lease, pair = (partial(replace, one) for one in (LEASE, PAIR))
chain, take_over = (partial(replace, one) for one in (CHAIN, TAKE_OVER))
tier, lending = (partial(replace, one) for one in (TIER, LENDING))
mutual, planned, at_any_time = (partial(replace, one) for one in (MUTUAL, PLANNED, AT_ANY_TIME))
drain = partial(replace, DRAIN)
Named = tuple[str, Setting]

SMALL_WORLDS: dict[str, Named] = {
    "lease": (
        "one lease; everything repeated; READ errors and stuck READs",
        lease(read_errors=1, time_outs=("lease", "read")),
    ),
    "lease-reader-restarts": (
        "the reader restarts",
        lease(crashes=(DECODE,), returns=True, repeats=False),
    ),
    "lease-owner-restarts": (
        "the owner restarts and leases again under the same id",
        lease(crashes=(PREFILL,), returns=True, repeats=False),
    ),
    "pair": ("every message repeated and reordered", pair(delivery="repeated")),
    "pair-forgotten": (
        "committed leases forgotten at once; everything repeated",
        pair(delivery="repeated", requests=ONE_BLOCK, committed_max=0),
    ),
    "pair-lossy": (
        "a message is lost for good, requests for reservations time out; a prompt of one block",
        pair(losses=1, requests=ONE_BLOCK, time_outs=("request",)),
    ),
    "pair-ranks": (
        "two ranks: every READ is two handles, each lands and ends by itself; READ errors",
        pair(num_ranks=2, read_errors=1),
    ),
    "pair-cancel": ("the client goes away", pair(cancels=1)),
    "pair-preempt-cancel": (
        "the prefill is preempted while its lease grows, the client goes away; Release and a "
        "second reservation with READs in progress",
        pair(preemptions=1, cancels=1),
    ),
    "pair-preempt-evict": (
        "the prefill is preempted, everything free is evicted",
        pair(preemptions=1, evictions=1),
    ),
    "pair-window": (
        "a full and a window group; the prefill is preempted",
        pair(specs=(FULL, WINDOW), num_blocks=8, preemptions=1),
    ),
    "pair-errors": ("a step fails, a READ fails", pair(step_errors=1, read_errors=1)),
    "pair-checksums": (
        "with checksums; a READ brings other bytes than there are, the client goes away",
        pair(checksums=True, bit_flips=1, cancels=1),
    ),
    "pair-restart": ("each worker restarts under its name", pair(crashes=BOTH, returns=True)),
    "pair-strangers": (
        "every message also from a wrong epoch, where it must change nothing; the client goes away",
        pair(wrong_epochs=True, cancels=1),
    ),
    "pair-shared": (
        "two hand-overs lease the same block, memory for both is lacking; no message is lost",
        pair(requests=(Request(),) * 2, passes_max=0, delivery="in order", any_order=True),
    ),
    "routers": (
        "two routers, each with a request of the same name: a hand-over, and one that D serves "
        "alone; the first router is gone for ever, and what the other one asks for is served",
        pair(
            requests=(
                Request(prompt=(5,), router="A"),
                Request(DECODE, DECODE, (8,), 1, router="B"),
            ),
            delivery="in order",
            whole_reads=True,
            routers_vanish=("A",),
            served=True,
        ),
    ),
    "pair-vanishes": (
        "either worker is gone for ever and nobody is told; then what the other waits for times "
        "out, and it holds nothing any more",
        pair(vanishes=BOTH, time_outs=EVERY_WAIT, late_time_outs=True),
    ),
    "pair-steps": (
        "two steps in flight; three tokens; a step fails, the client goes away",
        pair(steps_max=2, requests=LONGER, num_blocks=6, step_errors=1, cancels=1),
    ),
    "pair-steps-growing": (
        "two steps in flight; blocks of two tokens, a chunk ends within one; the client goes away",
        pair(
            steps_max=2,
            specs=(TWO_TOKENS,),
            requests=(Request(prompt=LONG_PROMPT, max_tokens=3),),
            cancels=1,
        ),
    ),
    "quarantine": (
        "READs are stuck and hold more of the pool than they may: the decode worker exits",
        pair(time_outs=("read",), quarantine_share=0.3),
    ),
    "mutual": (
        "two hand-overs, one each way; memory for one of them; each is refused up to three "
        "times, then given up",
        mutual(passes_max=2),
    ),
    "lockstep": (
        "both do everything at the same moment, back-off of 1 or 2 rounds",
        mutual(delays=(1, 2), passes_max=6),
    ),
    "mutual-steps": (
        "two steps in flight; decodes outgrow their reservations and preempt prefills",
        mutual(steps_max=2, requests=GROWING, num_blocks=6),
    ),
    "chain": (
        "C's cached prefix to P, P's prompt to D; everything free is evicted",
        chain(evictions=1),
    ),
    "chain-lost": (
        "P and C lose each other at any moment; eviction",
        chain(unlinked=((0, 1),), evictions=1),
    ),
    "chain-window": (
        "a full and a window group; eviction",
        chain(specs=(FULL, WINDOW), num_blocks=9, evictions=1),
    ),
    "chain-errors": (
        "a READ of either hop fails, what arrived is kept; eviction",
        chain(read_errors=1, evictions=1),
    ),
    "chain-two": (
        "two pulls, room to lend for one, one given up; answers are remembered of live leases only",
        chain(
            requests=(Request(1, 1, max_tokens=1, pull_from=0),) * 2,
            num_blocks=7,
            committed_max=0,
            share=0.2,
            cancels=1,
            delivery="in order",
            whole_reads=True,
        ),
    ),
    "take-over": (
        "D crashes at any moment, E takes the lease over; eviction",
        take_over(evictions=1),
    ),
    "chain-checksums": (
        "with checksums; a READ of either hop brings other bytes than there are; eviction",
        chain(checksums=True, bit_flips=1, evictions=1, delivery="in order"),
    ),
    "take-over-checksums": (
        "with checksums; a READ brings other bytes than there are",
        take_over(checksums=True, bit_flips=1),
    ),
    "take-over-errors": ("and a READ fails", take_over(read_errors=1)),
    "take-over-window": (
        "a full and a window group",
        take_over(specs=(FULL, WINDOW), num_blocks=9),
    ),
    "take-over-limits": (
        "E takes one sequence, and has one of its own",
        take_over(
            requests=(*TAKE_OVER.requests, Request(2, 2, (8, 9))),
            num_blocks=8,
            max_sequences=1,
            max_waiting=1,
        ),
    ),
    "chain-strangers": (
        "every message also from a wrong epoch; P and C lose each other",
        chain(wrong_epochs=True, unlinked=((0, 1),)),
    ),
    "take-over-strangers": (
        "every message also from a wrong epoch; D crashes; eviction",
        take_over(wrong_epochs=True, evictions=1),
    ),
    "tier": (
        "everything free is evicted, the client goes away; a block does not come whole",
        tier(evictions=1, cancels=1, tier_losses=1),
    ),
    "tier-cancel": (
        "a prompt of its own comes besides; everything free is evicted, a client goes away",
        tier(
            requests=(SHORT, SHORT, Request(0, 0, (8, 9), 1)),
            num_blocks=4,
            max_sequences=1,
            evictions=1,
            cancels=1,
        ),
    ),
    "tier-eviction": (
        "blocks are written before they are evicted; one does not come whole",
        tier(tier="eviction", num_blocks=6, evictions=1, tier_losses=1),
    ),
    "tier-reset": (
        "the prefix cache is reset, and the tier, which has the prompt from before and may stay as "
        "it is; requests come before and after; eviction",
        tier(
            requests=(SHORT,) * 2,
            stored=True,
            resets=1,
            clear_errors=1,
            evictions=1,
            any_order=True,
        ),
    ),
    "tier-resets": (
        "two resets of a tier that is empty at first, and may stay as it is",
        tier(requests=(SHORT,), resets=2, clear_errors=1),
    ),
    "tier-reset-writes": (
        "a reset of a tier that is empty at first; requests come before and after",
        tier(requests=(SHORT,) * 2, resets=1, any_order=True),
    ),
    "lending": (
        "two blocks; one does not come whole out of C's tier, a READ fails, the client goes away",
        lending(requests=(PULLS_TWO,), tier_losses=1, read_errors=1, cancels=1),
    ),
    "lending-own": (
        "C serves a request of its own besides; a client goes away",
        lending(
            requests=(*LENDING.requests, Request(0, 0, (8, 9), 1)),
            num_blocks=4,
            cancels=1,
        ),
    ),
    "lending-checksums": (
        "two blocks, with checksums; a READ brings other bytes than there are; everything repeated",
        lending(requests=(PULLS_TWO,), checksums=True, bit_flips=1, delivery="repeated"),
    ),
    "lending-lost": (
        "two blocks; P and C lose each other at any moment, P crashes; eviction",
        lending(requests=(PULLS_TWO,), unlinked=((0, 1),), crashes=(1,), evictions=1),
    ),
    "lending-time-outs": (
        "leases and requests for them time out at any moment, a READ fails, the client goes away; "
        "eviction",
        lending(time_outs=("lease", "request"), read_errors=1, cancels=1, evictions=1),
    ),
    "lending-strangers": (
        "every message repeated and reordered, and also from a wrong epoch",
        lending(delivery="repeated", wrong_epochs=True),
    ),
    "lending-reset": (
        "two blocks; the pull waits behind another request; both caches and the tier are reset; "
        "eviction",
        lending(
            requests=(Request(1, 1, (8,), 1), PULLS_TWO), max_sequences=1, resets=1, evictions=1
        ),
    ),
    "generation": (
        "one request, nothing goes wrong; three tokens; peers' messages and READs at any time",
        at_any_time(requests=LONGER),
    ),
    "generation-read-error": (
        "a READ fails; three tokens; at any time",
        at_any_time(requests=LONGER, read_errors=1),
    ),
    "generation-step-error": ("a step fails, a READ fails", planned(step_errors=1, read_errors=1)),
    "generation-steps": (
        "two steps in flight, a step fails; three tokens; at any time",
        at_any_time(steps_max=2, requests=LONGER, step_errors=1),
    ),
    "generation-refused": (
        "P's request for a reservation times out, D's grant is on its way; three "
        "tokens; at any time",
        at_any_time(requests=LONGER, time_outs=("request",), num_time_outs=1),
    ),
    "generation-prefill-crash": (
        "P crashes; the router may or may not have heard what it said before",
        planned(crashes=(PREFILL,)),
    ),
    "generation-decode-crash": (
        "D crashes, and may come back; three tokens; at any time",
        at_any_time(requests=LONGER, crashes=(DECODE,), returns=True),
    ),
    "generation-session": (
        "D's session with the router breaks, D lives on and gets another",
        planned(cuts=(DECODE,)),
    ),
    "generation-stalled": (
        "D serves alone, and E may; twice a report says that a step does not end, which may end "
        "all the same; three tokens, blocks of two; at any time",
        drain(drains=(), stalls=2),
    ),
    "generation-checksums": (
        "with checksums; a READ brings other bytes than there are",
        planned(checksums=True, bit_flips=1),
    ),
    "generation-cancel": ("a READ fails, the client goes away", planned(read_errors=1, cancels=1)),
    "drain": ("a READ fails", drain(read_errors=1)),
    "drain-window": (
        "a full and a window group",
        drain(specs=(TWO_TOKENS, WINDOW_OF_TWO), num_blocks=9),
    ),
    "drain-session": ("D's session with the router breaks", drain(cuts=(0,))),
    "drain-crash": ("D crashes while it drains, or before", drain(crashes=(0,))),
}
