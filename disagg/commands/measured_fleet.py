"""What a running fleet adds to an engine's times: requests of several shapes, and what they took.

An engine that is measured alone has the machine and the interpreter for itself. In a worker it
shares them with streams, in a fleet of one machine also with other workers, router and clients.
What follows for curves is found by `fitted_fleet`.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from disagg.commands.fleet_requests import Asked, FleetWorker, Measured, RunningFleet, prompt_of
from disagg.commands.rounds import Say, rounds
from disagg.commands.varied_lengths import varied_length
from disagg.config.settings import Settings
from disagg.errors import ConfigError, RemoteFault
from disagg.simulation.curves import Curves
from disagg.simulation.fleet_plan import roles_name

PROMPT_TOKENS = 48
LONGER_PROMPTS = (120, 240, 960, 2_880)
"""Tokens of the other prompts that are asked alone, of each at most half of what the model takes.
What is between two of them is on a line, so these are where prompts of requests are; none is a
chunk more where it is varied, if chunks are a power of two."""
BESIDE_PROMPTS = (PROMPT_TOKENS, 240, 960)
"""Likewise of those that are asked beside busy workers: steps of few tokens, and whole ones."""
BEHIND_PROMPTS, CACHED_TOKENS = (PROMPT_TOKENS, 240), 480
"""Tokens of those that are asked behind a cached prefix, and the prefix's."""
STREAMS_PER_WORKER = 4
"""At once, where what a sequence adds to a step is measured."""
SETTINGS_OF = {
    "fingerprint": "--model",
    "dtype": "worker.dtype, worker.kv_dtype",
    "page_format": "worker.engine",
    "num_ranks": "worker.tensor_parallel",
    "block_tokens": "worker.block_tokens",
    "max_model_tokens": "scheduling.max_model_tokens",
    "max_sequences": "scheduling.max_sequences",
}
"""By which they differ, for the fields of `Measured`."""
REST_S = 0.3
"""Before requests are asked: those of users come to workers at rest, whose caches others have used
meanwhile, more often than right after another one."""


@dataclass(frozen=True, slots=True)
class AskShape:
    """Requests that are asked together.

    Attributes:
        num_prompt: tokens of each prompt, beside those of the prefix.
        at_once: requests that are timed.
        beside: requests that have begun before them, and keep other workers busy.
        num_prefix: tokens of a prompt that was asked before, and that theirs begin with.
    """

    num_prompt: int
    at_once: int = 1
    beside: int = 0
    num_prefix: int = 0

    @property
    def is_alone(self) -> bool:
        """One request to a fleet that is idle and has seen nothing of it."""
        return self.at_once == 1 and not self.beside and not self.num_prefix


Answers = Mapping[AskShape, Asked]
"""What requests of every shape took."""
Workers = frozenset[FleetWorker]
"""Of the fleet; none where there is no admin port to ask."""


def check_roles(workers: Workers, settings: Settings) -> None:
    """Refuse a fleet that is not the settings': its times would be taken for theirs.

    Raises:
        ConfigError: its ready workers have other roles or another number.
    """
    cluster = settings.cluster
    wanted = cluster.num_prefill, cluster.num_decode, cluster.num_both
    roles = [one.role for one in workers if one.ready]
    found = roles.count("prefill"), roles.count("decode"), roles.count("both")
    if workers and found != wanted:
        raise ConfigError(
            f"cluster.num_prefill, num_decode, num_both: the settings have {roles_name(*wanted)}, "
            f"the fleet {roles_name(*found) or 'no worker that is ready'}",
            param="cluster.num_prefill",
        )


def check_alike(workers: Workers, measured: Measured) -> None:
    """Refuse a fleet whose workers are not the one that is measured: curves would mix the two.

    Raises:
        ConfigError: one of them is another one; names the setting.
    """
    for worker in sorted(workers):
        for name, ours, theirs in zip(SETTINGS_OF, measured, worker.measured, strict=True):
            if ours == theirs:
                continue
            setting = SETTINGS_OF[name]
            if name == "fingerprint":
                why = f"{worker.worker_id} of the fleet serves another checkpoint"
            else:
                why = (
                    f"{_shown(theirs)} at {worker.worker_id} of the fleet, {_shown(ours)} by the "
                    "settings given here; give those with which it was started"
                )
            raise ConfigError(f"{setting}: {why}", param=setting)


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def ask_shapes(curves: Curves, settings: Settings) -> tuple[AskShape, ...]:
    """What is asked: alone, several at once, beside busy workers, behind a cached prefix.

    Args:
        curves: of which the longest prompt and the workers of a host are known.
        settings: of the fleet.
    """
    longest = curves.max_model_tokens // 2
    alone = [num for num in LONGER_PROMPTS if num <= longest] or [longest]
    cluster = settings.cluster
    num_workers = cluster.num_prefill + cluster.num_decode + cluster.num_both
    num_beside = min(curves.workers_per_host, num_workers) - 1
    num_prefix = min(CACHED_TOKENS, longest)
    return (
        AskShape(PROMPT_TOKENS),
        AskShape(PROMPT_TOKENS, STREAMS_PER_WORKER * num_decoding(settings)),
        *map(AskShape, alone),
        *(AskShape(num, 1, num_beside) for num in BESIDE_PROMPTS if num <= longest and num_beside),
        *(AskShape(num, num_prefix=num_prefix) for num in BEHIND_PROMPTS if num <= longest),
    )


def ask_fleet(
    shapes: Sequence[AskShape],
    fleet: RunningFleet,
    repeats: int,
    say: Say,
    *,
    is_warm: bool = False,
) -> Answers:
    """Ask requests of every shape, all shapes one after the other in each of the rounds.

    Args:
        shapes: of `ask_shapes`.
        fleet: does nothing else meanwhile.
        repeats: rounds, after a first one; the median counts.
        say: told of every round.
        is_warm: it has been asked before, and needs no first round.

    Raises:
        RemoteFault: the fleet does not answer, refuses, serves somebody, or has other workers than
            when this began.
    """
    workers = fleet.wait_until_idle()

    def rest() -> None:
        time.sleep(REST_S)
        if (now := fleet.wait_until_idle()) != workers:
            names = ", ".join(sorted({one.worker_id for one in workers ^ now}))
            raise RemoteFault(f"the fleet has changed meanwhile: {names}; calibrate anew")

    def ask(one: AskShape, number: int) -> Asked:
        rest()
        prefix = prompt_of(one.num_prefix)
        if prefix:
            fleet.ask_at_once([prefix])
            rest()
        num_prompt = varied_length(one.num_prompt, number, repeats)
        prompts = [[*prefix, *prompt_of(num_prompt)] for _ in range(one.at_once)]
        return middle(fleet.ask_at_once(prompts, one.beside))

    for one in () if is_warm else shapes:  # connections, first steps
        ask(one, 0)
    found = [
        [ask(one, number) for one in shapes]
        for number in rounds("requests to the fleet", repeats, say)
    ]
    rest()
    same = zip(*found, strict=True)
    return {shape: middle(each) for shape, each in zip(shapes, same, strict=True)}


def middle(found: Sequence[Asked]) -> Asked:
    """Medians of each time."""
    return Asked(
        statistics.median(one.ttft_ms for one in found),
        statistics.median(one.tpot_ms for one in found),
        _middle([one.compute_ms for one in found]),
        _middle([one.second_ms for one in found]),
        statistics.median(one.num_cached for one in found),
        _middle([one.beside_tpot_ms for one in found]),
    )


def _middle(found: Sequence[float | None]) -> float | None:
    known = [one for one in found if one is not None]
    return statistics.median(known) if known else None


def num_decoding(settings: Settings) -> int:
    """Workers among which streams are shared."""
    return settings.cluster.num_both or settings.cluster.num_decode
