"""The worlds that `make test` exhausts."""

from dataclasses import replace

from disagg.checking.explorer.lease_world import LeaseSetting
from disagg.checking.explorer.named_world import NamedWorld
from disagg.checking.explorer.setting import (
    EVERY_WAIT,
    FULL,
    LONG_PROMPT,
    TWO_TOKENS,
    WINDOW,
    Request,
    Setting,
)

PREFILL, DECODE, THIRD = range(3)
BOTH = (PREFILL, DECODE)

LEASE = LeaseSetting(num_read_errors=1, stuck=True)
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

SMALL_WORLDS = (
    NamedWorld(
        "lease",
        "one lease; everything repeated; READ errors and stuck READs",
        LEASE,
    ),
    NamedWorld(
        "lease-retry",
        "abort or death, and a second lease with the same block ids and other bytes",
        LeaseSetting(num_leases=2, num_inbound=2, repeats=False),
    ),
    NamedWorld(
        "lease-reader-restarts",
        "the reader restarts",
        LeaseSetting(num_inbound=2, num_reader_restarts=1, repeats=False),
    ),
    NamedWorld(
        "lease-owner-restarts",
        "the owner restarts and leases again under the same id",
        LeaseSetting(num_leases=2, num_owner_restarts=1, repeats=False),
    ),
    NamedWorld(
        "lease-forgotten",
        "committed leases forgotten at once",
        LeaseSetting(committed_max=0),
    ),
    NamedWorld(
        "lease-lossy",
        "every message at most once; nothing else goes wrong: a commit stays reachable",
        LeaseSetting(lossy=True, ends=False),
    ),
    NamedWorld(
        "lease-ranks",
        "two ranks: every READ is two handles, each lands and ends by itself; READ errors",
        LeaseSetting(num_read_errors=1, repeats=False, num_ranks=2),
    ),
    NamedWorld("pair", "every message repeated and reordered", replace(PAIR, delivery="repeated")),
    NamedWorld("pair-cancel", "the client goes away", replace(PAIR, cancels=1)),
    NamedWorld(
        "pair-preempt-cancel",
        "the prefill is preempted while its lease grows, the client goes away; Release and a "
        "second reservation with READs in progress",
        replace(PAIR, preemptions=1, cancels=1),
    ),
    NamedWorld(
        "pair-preempt-evict",
        "the prefill is preempted, everything free is evicted",
        replace(PAIR, preemptions=1, evictions=1),
    ),
    NamedWorld(
        "pair-window",
        "a full and a window group; the prefill is preempted",
        replace(PAIR, specs=(FULL, WINDOW), num_blocks=8, preemptions=1),
    ),
    NamedWorld(
        "pair-errors", "a step fails, a READ fails", replace(PAIR, step_errors=1, read_errors=1)
    ),
    NamedWorld(
        "pair-restart",
        "each worker restarts under its name",
        replace(PAIR, crashes=BOTH, returns=True),
    ),
    NamedWorld(
        "pair-strangers",
        "every message also from a wrong epoch, where it must change nothing; the client goes away",
        replace(PAIR, wrong_epochs=True, cancels=1),
    ),
    NamedWorld(
        "pair-shared",
        "two hand-overs lease the same block, memory for both is lacking; no message is lost",
        replace(PAIR, requests=(Request(),) * 2, passes_max=0, delivery="in order", any_order=True),
    ),
    NamedWorld(
        "pair-growing",
        "blocks of two tokens, a chunk ends within one; the prefill is preempted, eviction",
        replace(
            PAIR,
            specs=(TWO_TOKENS,),
            requests=(Request(prompt=LONG_PROMPT),),
            preemptions=1,
            evictions=1,
        ),
    ),
    NamedWorld(
        "pair-vanishes",
        "either worker is gone for ever and nobody is told; then what the other waits for times "
        "out, and it holds nothing any more",
        replace(PAIR, vanishes=BOTH, time_outs=EVERY_WAIT, late_time_outs=True),
    ),
    NamedWorld(
        "pair-limits",
        "two hand-overs, and each worker takes one sequence and lets one wait",
        replace(
            PAIR,
            requests=(Request(), Request(prompt=(8, 9))),
            num_blocks=7,
            max_sequences=1,
            max_waiting=1,
            delivery="in order",
            any_order=True,
        ),
    ),
    NamedWorld(
        "quarantine",
        "READs are stuck and hold more of the pool than they may: the decode worker exits",
        replace(PAIR, time_outs=("read",), quarantine_share=0.3),
    ),
    NamedWorld(
        "mutual",
        "two hand-overs, one each way; memory for one of them; each is refused up to three times, "
        "then given up",
        replace(MUTUAL, passes_max=2),
    ),
    NamedWorld("mutual-roomy", "one block more", replace(MUTUAL, num_blocks=6)),
    NamedWorld(
        "mutual-preempt",
        "a prefill is preempted while its lease grows",
        replace(MUTUAL, preemptions=1),
    ),
    NamedWorld(
        "mutual-growing",
        "decodes outgrow their reservations and preempt prefills",
        replace(MUTUAL, requests=GROWING, num_blocks=6),
    ),
    NamedWorld(
        "mutual-older",
        "a request that lost its memory is overtaken by nobody",
        replace(MUTUAL, requests=OLDER, num_blocks=6, starved_by=1),
    ),
    NamedWorld(
        "lockstep",
        "both do everything at the same moment, back-off of 1 or 2 rounds",
        replace(MUTUAL, delays=(1, 2), passes_max=6),
    ),
    NamedWorld(
        "chain",
        "C's cached prefix to P, P's prompt to D; everything free is evicted",
        replace(CHAIN, evictions=1),
    ),
    NamedWorld(
        "chain-lost",
        "P and C lose each other at any moment; eviction",
        replace(CHAIN, unlinked=((0, 1),), evictions=1),
    ),
    NamedWorld(
        "chain-window",
        "a full and a window group; eviction",
        replace(CHAIN, specs=(FULL, WINDOW), num_blocks=9, evictions=1),
    ),
    NamedWorld(
        "chain-errors",
        "a READ of either hop fails, what arrived is kept; eviction",
        replace(CHAIN, read_errors=1, evictions=1),
    ),
    NamedWorld(
        "chain-two",
        "two pulls, one of them given up, and one answer is remembered",
        replace(
            CHAIN,
            requests=(Request(1, 1, max_tokens=1, pull_from=0),) * 2,
            num_blocks=7,
            committed_max=1,
            cancels=1,
            delivery="in order",
            whole_reads=True,
        ),
    ),
    NamedWorld(
        "take-over",
        "D crashes at any moment, E takes the lease over; eviction",
        replace(TAKE_OVER, evictions=1),
    ),
    NamedWorld("take-over-errors", "and a READ fails", replace(TAKE_OVER, read_errors=1)),
    NamedWorld(
        "take-over-window",
        "a full and a window group",
        replace(TAKE_OVER, specs=(FULL, WINDOW), num_blocks=9),
    ),
    NamedWorld(
        "take-over-limits",
        "E takes one sequence, and has one of its own",
        replace(
            TAKE_OVER,
            requests=(*TAKE_OVER.requests, Request(2, 2, (8, 9))),
            max_sequences=1,
            max_waiting=1,
        ),
    ),
    NamedWorld(
        "chain-strangers",
        "every message also from a wrong epoch; P and C lose each other",
        replace(CHAIN, wrong_epochs=True, unlinked=((0, 1),)),
    ),
    NamedWorld(
        "take-over-strangers",
        "every message also from a wrong epoch; D crashes; eviction",
        replace(TAKE_OVER, wrong_epochs=True, evictions=1),
    ),
    NamedWorld(
        "generation",
        "one request, nothing goes wrong; three tokens; peers' messages and READs at any time",
        replace(AT_ANY_TIME, requests=LONGER),
    ),
    NamedWorld(
        "generation-read-error",
        "a READ fails; three tokens; at any time",
        replace(AT_ANY_TIME, requests=LONGER, read_errors=1),
    ),
    NamedWorld(
        "generation-step-error",
        "a step fails, a READ fails",
        replace(PLANNED, step_errors=1, read_errors=1),
    ),
    NamedWorld(
        "generation-refused",
        "P's question times out, D's yes is on its way; three tokens; at any time",
        replace(AT_ANY_TIME, requests=LONGER, time_outs=("question",), num_time_outs=1),
    ),
    NamedWorld(
        "generation-prefill-crash",
        "P crashes; the router may or may not have heard what it said before",
        replace(PLANNED, crashes=(PREFILL,)),
    ),
    NamedWorld(
        "generation-decode-crash",
        "D crashes, and may come back; three tokens; at any time",
        replace(AT_ANY_TIME, requests=LONGER, crashes=(DECODE,), returns=True),
    ),
    NamedWorld(
        "generation-session",
        "D's session with the router breaks, D lives on and gets another",
        replace(PLANNED, cuts=(DECODE,)),
    ),
    NamedWorld(
        "generation-cancel",
        "a READ fails, the client goes away",
        replace(PLANNED, read_errors=1, cancels=1),
    ),
)
