"""An engine under the production scheduler, without the rest of a worker."""

from collections import deque
from dataclasses import replace

from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.outputs import StepOutputs
from disagg.messages.reports import PrefillReport
from disagg.messages.sampling import SamplingParams, TokenLogprobs
from disagg.messages.submit import Role, Submit
from disagg.scheduling.actions import ToRouter
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.limits import WorkerLimits
from disagg.scheduling.step import Step
from disagg.workers.engines.protocol import Engine

GREEDY = SamplingParams(max_tokens=10)


def core_over(
    engine: Engine, max_step_tokens: int, steps_max: int = 1, num_drafts: int = 0
) -> WorkerCore:
    limits = WorkerLimits(
        max_model_tokens=400,
        max_step_tokens=max_step_tokens,
        max_sequences=4,
        max_waiting=8,
        handover_share_max=1.0,
        reserve_timeout_ms=100,
        reserve_passes_max=3,
        reservation_ttl_ms=5_000,
        lease_ttl_ms=5_000,
        committed_max=2,
        commit_repeat_ms=50,
        read_stuck_ms=1_000,
        steps_max=steps_max,
        blocks_per_read_max=4,
        quarantine_share_max=1.0,
    )
    kv = KVCacheCoordinator(
        engine.layout,
        engine.region.num_blocks,
        max_model_tokens=limits.max_model_tokens,
        max_step_tokens=steps_max * max_step_tokens,
        steps_max=steps_max,
        num_lookahead_tokens=num_drafts,
    )
    hasher = BlockHasher(b"key", engine.layout.hash_block_tokens)
    return WorkerCore(Incarnation("w", "e"), engine.layout, kv, hasher, limits, lambda _: 1)


def serve(
    core: WorkerCore,
    engine: Engine,
    prompts: list[list[int]],
    sampling: SamplingParams = GREEDY,
    num_generated: int = 0,
    hits: list[int] | None = None,
    scores: list[list[TokenLogprobs]] | None = None,
) -> list[list[int]]:
    """The tokens that a worker answers with; so many of a prompt's were generated before.

    ``hits`` becomes how many of each prompt's tokens were found in the cache, ``scores`` what came
    of its tokens from the second on, in order and without a gap.
    """
    found: dict[str, int] = {}
    answers: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    for number, prompt in enumerate(prompts):
        key = RequestKey(str(number), 1)
        own = replace(sampling, num_prompt_tokens=len(prompt) - num_generated)
        core.on_router_message(0, Submit(key, Role.LOCAL, tuple(prompt), (), b"", own))
    by_prompt: dict[str, list[TokenLogprobs]] = {name: [] for name in answers}
    launched: deque[Step] = deque()
    while core.sequences or launched:
        while (step := core.next_step(0)[0]) is not None:
            engine.prepare(step)
            launched.append(step)
        step = launched.popleft()
        result = engine.run(step)
        assert result.error == ""
        assert [one is not None for one in result.samples] == [
            part.sampling is not None for part in step.slices
        ]
        for action in core.on_step_done(0, result):
            match action:
                case ToRouter(StepOutputs(outputs, scored)):
                    for one in scored:
                        so_far = by_prompt[one.key.request_id]
                        assert one.position == 1 + len(so_far)
                        assert not answers[one.key.request_id], "they come before all tokens"
                        so_far += one.logprobs
                    for output in outputs:
                        answers[output.key.request_id] += output.token_ids
                case ToRouter(PrefillReport() as report):
                    found[report.key.request_id] = report.hit_tokens
    if hits is not None:
        hits[:] = [found[name] for name in answers]
    if scores is not None:
        scores[:] = by_prompt.values()
    return list(answers.values())
