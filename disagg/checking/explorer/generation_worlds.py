"""The named worlds of a request that is planned anew, and how large each one is."""

from typing import NamedTuple

from disagg.checking.explorer.generation_setting import DECODE, PREFILL, GenerationSetting


class GenerationEntry(NamedTuple):
    """One world; the rest as in `disagg.checking.explorer.worlds.World`."""

    name: str
    what: str
    setting: GenerationSetting
    num_states: int
    only_full: bool = False


GENERATION_WORLDS = (
    GenerationEntry(
        "generation",
        "one request, nothing goes wrong; three tokens; peers' messages and READs at any time",
        GenerationSetting(max_tokens=3, peers_in_order=False, whole_reads=False),
        748,
    ),
    GenerationEntry(
        "generation-read-error",
        "a READ fails; three tokens; at any time",
        GenerationSetting(read_errors=1, max_tokens=3, peers_in_order=False, whole_reads=False),
        4_880,
    ),
    GenerationEntry(
        "generation-step-error",
        "a step fails, a READ fails",
        GenerationSetting(step_errors=1, read_errors=1),
        6_834,
    ),
    GenerationEntry(
        "generation-refused",
        "P's question times out, D's yes is on its way; three tokens; at any time",
        GenerationSetting(time_outs=1, max_tokens=3, peers_in_order=False, whole_reads=False),
        5_210,
    ),
    GenerationEntry(
        "generation-prefill-crash",
        "P crashes; the router may or may not have heard what it said before",
        GenerationSetting(crashes=(PREFILL,)),
        7_541,
    ),
    GenerationEntry(
        "generation-decode-crash",
        "D crashes, and may come back; three tokens; at any time",
        GenerationSetting(
            crashes=(DECODE,),
            restarts=True,
            max_tokens=3,
            peers_in_order=False,
            whole_reads=False,
        ),
        7_180,
    ),
    GenerationEntry(
        "generation-take-over",
        "D crashes, E takes the lease over or is planned anew",
        GenerationSetting(crashes=(DECODE,), second="decode", generations_max=4),
        27_246,
        only_full=True,
    ),
    GenerationEntry(
        "generation-session",
        "D's session with the router breaks, D lives on and gets another",
        GenerationSetting(cuts=(DECODE,)),
        17_074,
    ),
    GenerationEntry(
        "generation-cancel",
        "a READ fails, the client goes away",
        GenerationSetting(read_errors=1, cancels=1),
        4_410,
    ),
    GenerationEntry(
        "generation-read-error-evict",
        "a READ fails, everything free is evicted; three tokens; at any time",
        GenerationSetting(
            read_errors=1, evictions=1, max_tokens=3, peers_in_order=False, whole_reads=False
        ),
        23_409,
        only_full=True,
    ),
    GenerationEntry(
        "generation-session-evict",
        "D's session breaks, everything free is evicted",
        GenerationSetting(cuts=(DECODE,), evictions=1),
        64_841,
        only_full=True,
    ),
    GenerationEntry(
        "generation-step-error-crash",
        "a step fails, P crashes, and may come back",
        GenerationSetting(step_errors=1, crashes=(PREFILL,), restarts=True, generations_max=4),
        120_538,
        only_full=True,
    ),
    GenerationEntry(
        "generation-prefill-crash-more",
        "P crashes, and may come back; three tokens; at any time",
        GenerationSetting(
            crashes=(PREFILL,),
            restarts=True,
            max_tokens=3,
            peers_in_order=False,
            whole_reads=False,
        ),
        120_456,
        only_full=True,
    ),
    GenerationEntry(
        "generation-prefill-second",
        "P crashes, E prefills again for the same D",
        GenerationSetting(crashes=(PREFILL,), second="prefill", passes_max=1),
        119_756,
        only_full=True,
    ),
    GenerationEntry(
        "generation-decode-second",
        "P's question times out, E decodes; at any time",
        GenerationSetting(time_outs=1, second="decode", peers_in_order=False, whole_reads=False),
        150_864,
        only_full=True,
    ),
    GenerationEntry(
        "generation-take-over-more",
        "D crashes, E takes over; at any time",
        GenerationSetting(
            crashes=(DECODE,),
            second="decode",
            generations_max=4,
            peers_in_order=False,
            whole_reads=False,
        ),
        110_934,
        only_full=True,
    ),
    GenerationEntry(
        "generation-take-over-errors",
        "and a READ fails",
        GenerationSetting(crashes=(DECODE,), second="decode", generations_max=4, read_errors=1),
        127_892,
        only_full=True,
    ),
    GenerationEntry(
        "generation-sessions",
        "both sessions break, each once; an error is allowed",
        GenerationSetting(cuts=(PREFILL, DECODE), fails=True),
        211_255,
        only_full=True,
    ),
    GenerationEntry(
        "generation-session-error",
        "P's session breaks, a READ fails",
        GenerationSetting(cuts=(PREFILL,), read_errors=1),
        22_815,
        only_full=True,
    ),
    GenerationEntry(
        "generation-both-crash",
        "P and D crash, and may come back; an error is allowed",
        GenerationSetting(crashes=(PREFILL, DECODE), restarts=True, fails=True),
        33_363,
        only_full=True,
    ),
    GenerationEntry(
        "generation-crash-cancel",
        "P crashes, and may come back; the client goes away; at any time",
        GenerationSetting(crashes=(PREFILL,), restarts=True, cancels=1, peers_in_order=False),
        172_745,
        only_full=True,
    ),
)
GENERATION_SETTINGS = {one.name: one.setting for one in GENERATION_WORLDS}
