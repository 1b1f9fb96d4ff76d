"""What a worker can never serve, whatever its load."""

from bisect import bisect_right

from disagg.errors import ConfigError
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.messages.submit import Role, Submit
from disagg.scheduling.limits import WorkerLimits

SHORTEST_TOKENS = 2
"""Of a request: a prompt of one token and one that answers it."""


def num_blocks_for(kv: KVCacheCoordinator, num_tokens: int) -> int:
    """Most blocks a sequence of so many tokens holds at once, over all groups."""
    num_slots = kv.slots.total(num_tokens)
    return sum(min(m.num_blocks(num_slots), m.peak_blocks) for m in kv.managers)


def rejection_of(submit: Submit, limits: WorkerLimits, kv: KVCacheCoordinator) -> str:
    """Why this request can never be served here; "" when it can."""
    num_tokens = len(submit.token_ids)
    if num_tokens == 0:
        return "the prompt is empty"
    if num_tokens >= limits.max_model_tokens:
        return f"{num_tokens} tokens, at most {limits.max_model_tokens - 1} leave room for one more"
    num_prompt = submit.sampling.num_prompt_tokens
    if submit.sampling.tells_prompt_apart and not 0 < num_prompt <= num_tokens:
        # Set by the router. Without it the prompt would be taken for what was generated.
        said = f"sampling.num_prompt_tokens={num_prompt} of {num_tokens} tokens"
        return f"what is prompt and what is answer must be known: {said}"
    if submit.sampling.min_tokens and submit.sampling.grammar:
        return "min_tokens and a grammar: where it is complete nothing could follow"
    # A prefill part is over with its first token; everybody else must be able to end.
    num_new = 1 if submit.role is Role.PREFILL else submit.sampling.max_tokens
    length = min(num_tokens + num_new, limits.max_model_tokens)
    num_blocks = num_blocks_for(kv, length)
    if num_blocks > kv.num_usable_blocks:
        return f"{length} tokens need {num_blocks} blocks, the pool has {kv.num_usable_blocks}"
    if submit.role is not Role.LOCAL and submit.peer is None:
        return f"role {submit.role} names no peer"
    return ""


def served_tokens_max(limits: WorkerLimits, kv: KVCacheCoordinator) -> int:
    """Longest prompt plus output that can end here: the model's limit, or what the pool holds.

    Of one sequence in an otherwise empty pool, at the peak of each of its groups. A window counts
    with the tokens of one step beside it, however long the sequence grows: preempted at its last
    token, it is computed in chunks again.

    Raises:
        ConfigError: not even a prompt of one token and its answer fit.
    """
    refuse_too_few(kv.num_usable_blocks + 1, num_blocks_for(kv, SHORTEST_TOKENS))
    lengths = range(limits.max_model_tokens + 1)
    fitting = bisect_right(lengths, kv.num_usable_blocks, key=lambda n: num_blocks_for(kv, n))
    return fitting - 1


def refuse_too_few(num_blocks: int, needed: int) -> None:
    """Nothing, where a pool can serve anything at all.

    Args:
        num_blocks: of the pool, with the null block.
        needed: by a sequence of `SHORTEST_TOKENS`.

    Raises:
        ConfigError: it cannot; says how many blocks do.
    """
    if num_blocks <= needed:
        raise ConfigError(
            f"worker.num_blocks: {num_blocks} are too few for any request: one token and its"
            f" answer take {needed}, and one block is never used; at least {needed + 1}",
            param="worker.num_blocks",
        )


def handover_tokens_max(limits: WorkerLimits, kv: KVCacheCoordinator) -> int:
    """Longest prompt that fits this worker's pool, as either worker of a hand-over.

    A decode worker holds the prompt's blocks and room for one token more; windows count with what
    they hold. It may exceed ``handover_share_max``, one at a time; a share of 0 allows none.
    """
    share = int(limits.handover_share_max * kv.num_usable_blocks)
    blocks_max = kv.num_usable_blocks if share else 0
    low, high = 0, limits.max_model_tokens - 1
    while low < high:
        middle = (low + high + 1) // 2
        if num_blocks_for(kv, middle + 1) <= blocks_max:
            low = middle
        else:
            high = middle - 1
    return low
