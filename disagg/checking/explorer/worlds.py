"""The named worlds that `disagg explore` and the tests exhaust, and how large each one is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from disagg.checking.explorer.exploration import Exploration
from disagg.checking.explorer.fleet_setting import TAKE_OVER, FleetSetting
from disagg.checking.explorer.fleet_world import FleetWorld
from disagg.checking.explorer.generation_world import GenerationWorld
from disagg.checking.explorer.generation_worlds import GENERATION_SETTINGS, GENERATION_WORLDS
from disagg.checking.explorer.lease_world import LeaseWorld, Setting
from disagg.checking.explorer.lockstep_world import LockstepWorld
from disagg.checking.explorer.mutual_world import MutualSetting, MutualWorld, Wanted
from disagg.checking.explorer.pair_setting import (
    FULL,
    LONG_PROMPT,
    SIDES,
    TWO_TOKENS,
    WINDOW,
    PairSetting,
)
from disagg.checking.explorer.pair_world import PairWorld
from disagg.checking.explorer.ranks_world import RanksWorld


@dataclass(frozen=True, slots=True)
class World:
    """One world.

    Attributes:
        name: for the command line.
        what: what may happen in it.
        explore: visits everything.
        num_states: seen when it was last explored; a test holds it.
        only_full: too large for `make test`.
    """

    name: str
    what: str
    explore: Callable[[], Exploration]
    num_states: int
    only_full: bool = False


def _of(kind: Callable[[Any], Any], settings: Mapping[str, Any]) -> Callable[..., World]:
    """Makes worlds of one kind by their names."""

    def world(name: str, what: str, num_states: int, *, only_full: bool = False) -> World:
        return World(name, what, lambda: kind(settings[name]).explore(), num_states, only_full)

    return world


def _lockstep() -> Exploration:
    return LockstepWorld(MUTUAL_SETTINGS["mutual"]).explore()


LEASE_SETTINGS = {
    "lease": Setting(num_read_errors=1, stuck=True),
    "lease-retry": Setting(num_leases=2, num_inbound=2, repeats=False),
    "lease-reader-restarts": Setting(num_inbound=2, num_reader_restarts=1, repeats=False),
    "lease-owner-restarts": Setting(num_leases=2, num_owner_restarts=1, repeats=False),
    "lease-forgotten": Setting(committed_max=0),
    "lease-lossy": Setting(lossy=True, ends=False),
    "lease-ranks": Setting(num_read_errors=1, repeats=False),
    "lease-ranks-repeated": Setting(num_read_errors=1, stuck=True),
}
PAIR_SETTINGS = {
    "pair": PairSetting(),
    "pair-cancel": PairSetting(cancels=1, repeats=False),
    "pair-preempt-cancel": PairSetting(preemptions=1, cancels=1, repeats=False),
    "pair-preempt-evict": PairSetting(preemptions=1, evictions=1, repeats=False),
    "pair-window": PairSetting(specs=(FULL, WINDOW), num_blocks=8, preemptions=1, repeats=False),
    "pair-errors": PairSetting(step_errors=1, read_errors=1, repeats=False),
    "pair-restart": PairSetting(restarts=(1, 1), repeats=False),
    "pair-strangers": PairSetting(wrong_epochs=True, cancels=1, repeats=False),
    "pair-shared": PairSetting(
        num_requests=2, num_blocks=5, passes_max=0, in_order=True, repeats=False
    ),
    "pair-growing": PairSetting(
        specs=(TWO_TOKENS,), prompt=LONG_PROMPT, preemptions=1, evictions=1, repeats=False
    ),
    "pair-vanishes": PairSetting(vanishes=SIDES, late_time_outs=True, repeats=False),
    "pair-time-outs": PairSetting(time_outs=True, repeats=False),
    "pair-losses": PairSetting(losses=1, cancels=1, repeats=False),
    "pair-losses-time-outs": PairSetting(losses=1, passes_max=0, time_outs=True, repeats=False),
    "pair-vanishes-time-outs": PairSetting(vanishes=SIDES, time_outs=True, repeats=False),
    "pair-strangers-repeated": PairSetting(wrong_epochs=True),
    "pair-cancel-repeated": PairSetting(cancels=1),
    "pair-preempt-repeated": PairSetting(preemptions=1),
    "pair-decode-restarts": PairSetting(restarts=(0, 1)),
    "pair-prefill-restarts": PairSetting(restarts=(1, 0)),
    "pair-shared-more": PairSetting(num_requests=2, num_blocks=7, in_order=True, repeats=False),
    "pair-growing-shared": PairSetting(
        specs=(TWO_TOKENS,),
        prompt=LONG_PROMPT,
        num_requests=2,
        num_blocks=7,
        in_order=True,
        repeats=False,
    ),
}
FLEET_SETTINGS = {
    "chain": FleetSetting(evictions=1),
    "chain-lost": FleetSetting(owner_lost=True, evictions=1),
    "chain-window": FleetSetting(specs=(FULL, WINDOW), num_blocks=9, evictions=1),
    "chain-errors": FleetSetting(read_errors=1, evictions=1),
    "take-over": FleetSetting(TAKE_OVER, evictions=1),
    "take-over-errors": FleetSetting(TAKE_OVER, read_errors=1),
    "take-over-window": FleetSetting(TAKE_OVER, specs=(FULL, WINDOW), num_blocks=9),
    "take-over-cut": FleetSetting(TAKE_OVER, crash=False),
    "chain-strangers": FleetSetting(wrong_epochs=True, owner_lost=True),
    "take-over-strangers": FleetSetting(TAKE_OVER, wrong_epochs=True, evictions=1),
    "chain-repeated": FleetSetting(repeats=True),
    "chain-time-outs": FleetSetting(question_time_outs=True),
    "take-over-cancel": FleetSetting(TAKE_OVER, cancels=1, evictions=1),
    "take-over-repeated": FleetSetting(TAKE_OVER, repeats=True),
    "take-over-time-outs": FleetSetting(TAKE_OVER, question_time_outs=True, lease_time_outs=True),
    "take-over-cut-strangers": FleetSetting(TAKE_OVER, wrong_epochs=True, crash=False),
}
_BOTH_WAYS = (Wanted(0, 1), Wanted(1, 0))
_GROWING, _SHORT = Wanted(1, 1, num_output=3), Wanted(0, 1, num_prompt=1)
_LONG_LOCAL = tuple(Wanted(side, side, num_prompt=4, num_output=1) for side in (0, 1))
MUTUAL_SETTINGS = {
    "mutual": MutualSetting(),
    "mutual-roomy": MutualSetting(num_blocks=6),
    "mutual-preempt": MutualSetting(preemptions=1),
    "mutual-growing": MutualSetting(
        (Wanted(0, 1, num_output=3), Wanted(1, 0, num_output=3)), num_blocks=6
    ),
    "mutual-three": MutualSetting((*_BOTH_WAYS, _SHORT)),
    "mutual-older": MutualSetting((_GROWING, _SHORT, _SHORT), num_blocks=6, starved_by=1),
    "mutual-older-more": MutualSetting(
        (_GROWING, _SHORT, _SHORT, _SHORT), num_blocks=6, starved_by=1
    ),
    "mutual-queue": MutualSetting(
        (*_BOTH_WAYS, *_LONG_LOCAL), num_blocks=6, at_once=True, preemptions=2
    ),
}

_lease = _of(LeaseWorld, LEASE_SETTINGS)
_ranks = _of(RanksWorld, LEASE_SETTINGS)
_pair = _of(PairWorld, PAIR_SETTINGS)
_mutual = _of(MutualWorld, MUTUAL_SETTINGS)
_fleet = _of(FleetWorld, FLEET_SETTINGS)
_generation = _of(GenerationWorld, GENERATION_SETTINGS)

WORLDS = (
    _lease(
        "lease",
        "one lease; everything repeated; READ errors and stuck READs",
        11_957,
    ),
    _lease(
        "lease-retry",
        "abort or death, and a second lease with the same block ids and other bytes",
        17_442,
    ),
    _lease(
        "lease-reader-restarts",
        "the reader restarts",
        2_203,
    ),
    _lease(
        "lease-owner-restarts",
        "the owner restarts and leases again under the same id",
        20_119,
    ),
    _lease(
        "lease-forgotten",
        "committed leases forgotten at once",
        3_774,
    ),
    _lease(
        "lease-lossy",
        "every message at most once; nothing else goes wrong: a commit stays reachable",
        6_777,
    ),
    _ranks(
        "lease-ranks",
        "two ranks: every READ is two handles, each lands and ends by itself; READ errors",
        15_680,
    ),
    _ranks(
        "lease-ranks-repeated",
        "two ranks; everything repeated; READ errors and stuck READs",
        256_485,
        only_full=True,
    ),
    _pair("pair", "every message repeated and reordered", 11_488),
    _pair("pair-cancel", "the client goes away", 2_756),
    _pair(
        "pair-preempt-cancel",
        "the prefill is preempted while its lease grows, the client goes away; "
        "Release and a second reservation with READs in progress",
        29_526,
    ),
    _pair(
        "pair-preempt-evict",
        "the prefill is preempted, everything free is evicted",
        20_018,
    ),
    _pair(
        "pair-window",
        "a full and a window group; the prefill is preempted",
        9_216,
    ),
    _pair("pair-errors", "a step fails, a READ fails", 1_596),
    _pair("pair-restart", "each worker restarts under its name", 755),
    _pair(
        "pair-strangers",
        "every message also from a wrong epoch, where it must change nothing; the client goes away",
        2_756,
    ),
    _pair(
        "pair-shared",
        "two hand-overs lease the same block, memory for both is lacking; no message is lost",
        6_506,
    ),
    _pair(
        "pair-growing",
        "blocks of two tokens, a chunk ends within one; the prefill is preempted, eviction",
        23_392,
    ),
    _pair(
        "pair-vanishes",
        "either worker is gone for ever and nobody is told; then what the other waits for times "
        "out, and it holds nothing any more",
        1_214,
    ),
    _pair(
        "pair-time-outs",
        "questions, leases, reservations and READs time out at any moment",
        106_878,
        only_full=True,
    ),
    _pair(
        "pair-losses",
        "a message is lost for good, the client goes away",
        418_504,
        only_full=True,
    ),
    _pair(
        "pair-losses-time-outs",
        "a message is lost for good; questions, leases, reservations and READs time out at any "
        "moment; a refused prefill is not tried again",
        556_510,
        only_full=True,
    ),
    _pair(
        "pair-vanishes-time-outs",
        "either worker is gone for ever; everything times out at any moment",
        344_554,
        only_full=True,
    ),
    _pair(
        "pair-strangers-repeated",
        "every message repeated and reordered, and also from a wrong epoch",
        11_488,
        only_full=True,
    ),
    _pair(
        "pair-cancel-repeated",
        "every message repeated and reordered; the client goes away",
        139_331,
        only_full=True,
    ),
    _pair(
        "pair-preempt-repeated",
        "every message repeated and reordered; the prefill is preempted",
        367_316,
        only_full=True,
    ),
    _pair(
        "pair-decode-restarts",
        "every message repeated and reordered; the decode worker restarts",
        12_665,
        only_full=True,
    ),
    _pair(
        "pair-prefill-restarts",
        "every message repeated and reordered; the prefill worker restarts",
        21_822,
        only_full=True,
    ),
    _pair(
        "pair-shared-more",
        "two hand-overs lease the same block, with memory for both and refusals retried",
        24_942,
        only_full=True,
    ),
    _pair(
        "pair-growing-shared",
        "blocks of two tokens, two hand-overs of the same prompt",
        31_416,
        only_full=True,
    ),
    _mutual("mutual", "two hand-overs, one each way; memory for one of them", 307),
    _mutual("mutual-roomy", "one block more", 2_070),
    _mutual("mutual-preempt", "a prefill is preempted while its lease grows", 1_687),
    _mutual("mutual-growing", "decodes outgrow their reservations and preempt prefills", 2_718),
    _mutual("mutual-three", "and a third hand-over", 8_523, only_full=True),
    _mutual("mutual-older", "a request that lost its memory is overtaken by nobody", 3_554),
    World(
        "lockstep",
        "both do everything at the same moment, back-off of 1 or 2 rounds",
        _lockstep,
        46,
    ),
    _mutual("mutual-older-more", "by nobody of three", 61_196, only_full=True),
    _mutual(
        "mutual-queue",
        "both prefills are preempted and queue behind longer prompts",
        16_372,
        only_full=True,
    ),
    _fleet("chain", "C's cached prefix to P, P's prompt to D; everything free is evicted", 854),
    _fleet("chain-lost", "P and C lose each other at any moment; eviction", 15_458),
    _fleet("chain-window", "a full and a window group; eviction", 1_478),
    _fleet("chain-errors", "a READ of either hop fails, what arrived is kept; eviction", 4_980),
    _fleet("take-over", "D crashes at any moment, E takes the lease over; eviction", 2_030),
    _fleet("take-over-errors", "and a READ fails", 5_958),
    _fleet("take-over-window", "a full and a window group", 1_628),
    _fleet("take-over-cut", "D lives on, but its link to P is cut", 64_219, only_full=True),
    _fleet(
        "chain-strangers",
        "every message also from a wrong epoch; P and C lose each other",
        14_618,
    ),
    _fleet(
        "take-over-strangers",
        "every message also from a wrong epoch; D crashes; eviction",
        6_418,
    ),
    _fleet("chain-repeated", "every message repeated and reordered", 29_870, only_full=True),
    _fleet("chain-time-outs", "questions time out at any moment", 108_688, only_full=True),
    _fleet("take-over-cancel", "the client goes away; eviction", 56_704, only_full=True),
    _fleet("take-over-repeated", "every message repeated and reordered", 32_578, only_full=True),
    _fleet(
        "take-over-time-outs",
        "questions and leases time out at any moment",
        105_002,
        only_full=True,
    ),
    _fleet(
        "take-over-cut-strangers",
        "every message also from a wrong epoch; D lives on, cut off",
        175_739,
        only_full=True,
    ),
    *(
        _generation(one.name, one.what, one.num_states, only_full=one.only_full)
        for one in GENERATION_WORLDS
    ),
)


def document() -> str:
    """The table in ``docs/lease.md``."""
    lines = ["| world | what may happen | states |", "|---|---|---|"]
    lines += [
        f"| `{one.name}`{' (full)' if one.only_full else ''} | {one.what} | {one.num_states:,} |"
        for one in WORLDS
    ]
    return "\n".join(lines) + "\n"
