"""What may happen between three workers, and how often."""

from collections.abc import Callable
from dataclasses import dataclass

from disagg.checking.explorer.pair_setting import FULL, nothing_taken_away
from disagg.kv.kinds.kind import Spec
from disagg.scheduling.core import WorkerCore

CHAIN, TAKE_OVER = ("cache", "prefill", "decode"), ("prefill", "decode", "second")


@dataclass(frozen=True)
class FleetSetting:
    """What may happen, and how often.

    Attributes:
        names: `CHAIN` or `TAKE_OVER`.
        specs: layers of the model; one token is one block.
        num_blocks: of each pool, the null block included.
        repeats: a message may arrive more than once, and questions are asked again.
        question_time_outs: of questions, reservations' and leases'.
        lease_time_outs: leases expire at any moment.
        evictions: of everything free, at any worker.
        cancels: the client goes away.
        read_errors: READs that fail.
        wrong_epochs: every message also comes from an incarnation nobody knows: one of them may ask
            one worker for leases, which answers anybody; nothing else may come of it.
        owner_lost: P notices that C is gone, though it is not.
        crash: of D, in a take-over; otherwise its link to P is cut.
        mutate: takes a rule away, in negative controls.
    """

    names: tuple[str, ...] = CHAIN
    specs: tuple[Spec, ...] = (FULL,)
    num_blocks: int = 5
    repeats: bool = False
    question_time_outs: bool = False
    lease_time_outs: bool = False
    evictions: int = 0
    cancels: int = 0
    read_errors: int = 0
    wrong_epochs: bool = False
    owner_lost: bool = False
    crash: bool = True
    mutate: Callable[[WorkerCore], None] = nothing_taken_away
