"""What may happen in a world of whole workers, and how often: all of it is data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.messages.identity import RequestKey
from disagg.scheduling.tiers.index import WritePolicy

PROMPT, LONG_PROMPT = (5, 6), (4, 5, 6)
FULL: Spec = FullAttentionSpec(1, 1, 1, 2)
TWO_TOKENS: Spec = FullAttentionSpec(2, 1, 1, 2)
WINDOW: Spec = SlidingWindowSpec(1, 1, 1, 2, 2)
WINDOW_OF_TWO: Spec = SlidingWindowSpec(2, 1, 1, 2, 2)

Wait = Literal["request", "read", "lease", "reservation"]
EVERY_WAIT: tuple[Wait, ...] = ("request", "read", "lease", "reservation")


def nothing_taken_away(core: Any) -> None:
    """The worker, or the router, as it is."""


@dataclass(frozen=True)
class Request:
    """One request. Where it is served counts for the scripted router only.

    Attributes:
        prefill: index of the worker that prefills.
        decode: of the one that decodes; the same one serves it alone.
        prompt: token ids.
        max_tokens: tokens wanted.
        pull_from: the worker whose cached prefix the prefill pulls.
        taken_over_by: the worker that takes the lease over when the decode worker is lost.
        router: name of the router that it comes from; "" where there is one only.
    """

    prefill: int = 0
    decode: int = 1
    prompt: tuple[int, ...] = PROMPT
    max_tokens: int = 2
    pull_from: int | None = None
    taken_over_by: int | None = None
    router: str = ""

    @property
    def sides(self) -> tuple[int, ...]:
        """Every worker with a part in its first generation."""
        return tuple(dict.fromkeys((self.prefill, self.decode)))


@dataclass(frozen=True)
class Setting:
    """Who is there, how messages travel, what may go wrong and how often.

    Attributes:
        workers: their names.
        requests: all there are, from the start; of each router named r, s, t ...
        roles: of each worker, for the router's core, which then plans the requests; empty: a
            scripted router submits each where it says, and cancels at all what one of them ended.
        generations_max: plans of a request before the router's core gives up.
        cached_at: workers that have served the first prompt before.
        tables_alone: no scheduler drives the tables: the first worker opens leases and the second
            one begins transfers at any moment, of one generation and without a router.
        tries: leases that such a worker opens in its life, or transfers that it begins.

        specs: layers of the model.
        num_blocks: of each pool, the null block included.
        passes_max: refused reservations before a prefill gives up.
        share: of a pool that hand-overs may take.
        steps_max: steps in flight at once at a worker.
        max_sequences: that may hold blocks at a worker.
        max_waiting: that may wait there.
        committed_max: committed leases, and answered requests for leases, that are remembered.
        tier: when blocks are written to a tier; None: nobody has one.
        tiers_at: workers that have a tier of their own.
        stored: these tiers have the blocks of all prompts already, and their pools have not.
        quarantine_share: of a pool that READs without an end may hold before the worker exits.
        checksums: offers carry those of their blocks.

        delivery: what one worker says to another arrives *once*, at any later time or never;
            *repeated*, any number of times; or *in order*, once, until the stream ends.
        repeats: what is not answered is repeated, unless messages arrive in order.
        num_ranks: of each worker; each reads its part of a block, with a handle of its own.
        whole_reads: a READ lands when it is DONE, not at any moment before.
        any_order: submits to one worker may overtake each other.
        at_once: every submit arrives before anything else happens, at the first worker first.
        delays: everything happens at the same moment, in rounds, and who is refused waits for one
            of so many; empty: anything may happen at any moment.

        cancels: clients that go away.
        losses: messages lost for good.
        preemptions: leased prefills that lose their blocks at the end of a step.
        evictions: of everything that is free, at any worker.
        tier_losses: blocks that do not come whole out of a tier.
        resets: of all workers' prefix caches, with their tiers.
        clear_errors: tiers that cannot be emptied.
        step_errors: steps that fail.
        read_errors: READs that fail.
        bit_flips: READs that bring other bytes than there are, and end well.
        time_outs: what may time out at any moment.
        num_time_outs: how often; None: without a bound.
        late_time_outs: only once a message or a worker is lost for good.
        crashes: workers that may crash, each once.
        returns: a crashed worker may come back under its name.
        drains: workers that may be asked to end, which they do once nothing goes on, or a bounded
            time later.
        stalls: reports, of any workers, that a step does not end.
        cuts: workers whose session with the router may break, each once, though they live on.
        unlinked: pairs that may lose each other at any moment, though both live on.
        vanishes: workers of which one may be gone for ever, and nobody is told.
        routers_vanish: routers that may be gone for ever; every worker notices, each at any time.
        wrong_epochs: every message also comes from another life of its sender.
        error_allowed: clients may get an error from the router's core.

        served: from every state in which nobody has used up its passes, all can be served.
        starved_by: overtaken so often while it waits for memory, a request counts as starved; one
            overtakes that begins after the other lost its memory and ends before it has it again.

        cancel_overtakes: a cancel may arrive before its submit (a negative control).
        echoes: the scripted router cancels at both what one of them ended.
        late_sessions: a new session leaves the old one's orders (a negative control).
        checks_addressee: a message reaches no other life of its addressee, but in a control.
        waits_for: handles that must be terminal before a READ is: all, but in a control.
        any_error: a READ has failed when any of its handles has; the last one's, in a control.
        mutate: takes a rule away from every worker, in negative controls.
        mutate_router: takes one away from the router's core.
    """

    workers: tuple[str, ...] = ("prefill", "decode")
    requests: tuple[Request, ...] = (Request(),)
    roles: tuple[str, ...] = ()
    generations_max: int = 3
    cached_at: tuple[int, ...] = ()
    tables_alone: bool = False
    tries: int = 1

    specs: tuple[Spec, ...] = (FULL,)
    num_blocks: int = 5
    passes_max: int = 1
    share: float = 1.0
    steps_max: int = 1
    max_sequences: int = 4
    max_waiting: int = 4
    committed_max: int = 2
    tier: WritePolicy | None = None
    tiers_at: tuple[int, ...] = (0,)
    stored: bool = False
    quarantine_share: float = 1.0
    checksums: bool = False

    delivery: Literal["once", "repeated", "in order"] = "once"
    repeats: bool = True
    num_ranks: int = 1
    whole_reads: bool = False
    any_order: bool = False
    at_once: bool = False
    delays: tuple[int, ...] = ()

    cancels: int = 0
    losses: int = 0
    preemptions: int = 0
    evictions: int = 0
    tier_losses: int = 0
    resets: int = 0
    clear_errors: int = 0
    step_errors: int = 0
    read_errors: int = 0
    bit_flips: int = 0
    time_outs: tuple[Wait, ...] = ()
    num_time_outs: int | None = None
    late_time_outs: bool = False
    crashes: tuple[int, ...] = ()
    returns: bool = False
    drains: tuple[int, ...] = ()
    stalls: int = 0
    cuts: tuple[int, ...] = ()
    unlinked: tuple[tuple[int, int], ...] = ()
    vanishes: tuple[int, ...] = ()
    routers_vanish: tuple[str, ...] = ()
    wrong_epochs: bool = False
    error_allowed: bool = False

    served: bool = False
    starved_by: int = 0

    cancel_overtakes: bool = False
    echoes: bool = True
    late_sessions: bool = False
    checks_addressee: bool = True
    waits_for: int | None = None
    any_error: bool = True
    mutate: Callable[[Any], None] = nothing_taken_away
    mutate_router: Callable[[Any], None] = nothing_taken_away

    @property
    def keys(self) -> tuple[RequestKey, ...]:
        """Of every request's first generation: routers know nothing of each other's names."""
        names = {one.router: iter("rstuv") for one in self.requests}
        return tuple(RequestKey(next(names[one.router]), 1, one.router) for one in self.requests)
