"""What may happen between two workers, and how often."""

from collections.abc import Callable
from dataclasses import dataclass

from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.scheduling.core import WorkerCore

PROMPT, LONG_PROMPT = (5, 6), (4, 5, 6)
OUTPUT = 7
SIDES = (0, 1)
NAMES = ("prefill", "decode")
FULL: Spec = FullAttentionSpec(1, 1, 1, 2)
TWO_TOKENS: Spec = FullAttentionSpec(2, 1, 1, 2)
WINDOW: Spec = SlidingWindowSpec(1, 1, 1, 2, 2)


def nothing_taken_away(core: WorkerCore) -> None:
    """The workers as they are."""


@dataclass(frozen=True)
class PairSetting:
    """What may happen, and how often.

    Attributes:
        specs: layers of the model, all of the same block size.
        prompt: of every request.
        num_blocks: of each pool, the null block included.
        num_requests: with the same prompt, all at the start.
        passes_max: refused reservations before a prefill gives up.
        time_outs: of questions, leases and reservations, and stuck READs.
        late_time_outs: the same, once a message or a worker is lost for good.
        repeats: a message may arrive more than once, and is asked for again.
        in_order: every message arrives once, in the order of sending.
        wrong_epochs: every message also comes from an incarnation nobody knows.
        mutate: takes a rule away, in negative controls.
        cancel_overtakes: a cancel may arrive before its submit (a negative control).
        losses: messages that are lost for good; what can be asked for again is.
        echoes: the router cancels at both workers what one of them ended.
        restarts: how often each worker may restart under its name.
        vanishes: sides of which one may be gone for ever, and nobody is told.
    """

    specs: tuple[Spec, ...] = (FULL,)
    prompt: tuple[int, ...] = PROMPT
    num_blocks: int = 5
    num_requests: int = 1
    passes_max: int = 1
    share: float = 1.0
    time_outs: bool = False
    late_time_outs: bool = False
    repeats: bool = True
    in_order: bool = False
    wrong_epochs: bool = False
    cancel_overtakes: bool = False
    echoes: bool = True
    losses: int = 0
    cancels: int = 0
    preemptions: int = 0
    evictions: int = 0
    step_errors: int = 0
    read_errors: int = 0
    restarts: tuple[int, int] = (0, 0)
    vanishes: tuple[int, ...] = ()
    mutate: Callable[[WorkerCore], None] = nothing_taken_away
