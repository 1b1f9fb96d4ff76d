"""What may happen to one request that the router plans again and again, and how often."""

from collections.abc import Callable
from dataclasses import dataclass

from disagg.checking.explorer.pair_setting import nothing_taken_away
from disagg.routing.core import RouterCore
from disagg.scheduling.core import WorkerCore

NAMES = ("prefill", "decode", "second")
PREFILL, DECODE, SECOND = range(3)


def nothing_taken_from_the_router(core: RouterCore) -> None:
    """The router as it is."""


@dataclass(frozen=True)
class GenerationSetting:
    """What may happen, and how often. All faults happen before the client has its end.

    Attributes:
        second: role of a third worker; "" for none.
        max_tokens: of the request.
        num_blocks: of each pool, the null block included; one token is one block.
        crashes: workers that may crash, each once; two crash at most.
        restarts: a crashed worker may come back under its name.
        cuts: workers whose session with the router may break, each once, though they live on.
        late_sessions: a session that was opened anew leaves the old one's messages (a negative
            control).
        read_errors: READs that fail.
        step_errors: steps that fail.
        evictions: of everything free, at any worker.
        time_outs: reservations that are given up without an answer.
        passes_max: refused reservations before a prefill gives up.
        generations_max: plans before the router gives up.
        cancels: the client goes away.
        peers_in_order: what one worker sends to another arrives in order; otherwise at any time.
        whole_reads: a READ lands when it is DONE, not at any time before.
        fails: the client may get an error; otherwise that is a broken promise.
        mutate: takes a rule away from every worker, in negative controls.
        mutate_router: takes one away from the router.
    """

    second: str = ""
    max_tokens: int = 2
    num_blocks: int = 6
    crashes: tuple[int, ...] = ()
    restarts: bool = False
    cuts: tuple[int, ...] = ()
    late_sessions: bool = False
    read_errors: int = 0
    step_errors: int = 0
    evictions: int = 0
    time_outs: int = 0
    passes_max: int = 0
    generations_max: int = 3
    cancels: int = 0
    peers_in_order: bool = True
    whole_reads: bool = True
    fails: bool = False
    mutate: Callable[[WorkerCore], None] = nothing_taken_away
    mutate_router: Callable[[RouterCore], None] = nothing_taken_from_the_router
