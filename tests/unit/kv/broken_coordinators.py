"""Coordinators with one rule broken each, which random lives must show."""

from typing import Any

from disagg.kv.sequence import KVSequence


def publishes_early(kv: Any) -> None:
    """Publication at allocation, before the step has completed."""
    allocate = kv.allocate

    def broken(request: KVSequence, **kwargs: Any) -> Any:
        done = allocate(request, **kwargs)
        if done:
            kv.publish(request.key, kv.num_scheduled_tokens(request.key))
        return done

    kv.allocate = broken


def forgets_steps(kv: Any) -> None:
    """Steps in flight hold nothing."""
    kv.hold_step = lambda step_id, keys: None


def drops_too_much(kv: Any) -> None:
    """The window counted one token too narrow."""
    for manager in kv.managers:
        skipped = manager.skipped_tokens
        manager.skipped_tokens = lambda n, skipped=skipped: skipped(n + 1) if n else 0


def publishes_uncommitted(kv: Any) -> None:
    """External tokens become findable when they are reserved."""
    reserve = kv.reserve_external

    def broken(request: KVSequence, *args: Any) -> Any:
        made = reserve(request, *args)
        if made is not None:
            for manager in kv.managers:
                manager.publish(request.key, request.hashes, (), made.num_external_tokens, True)
        return made

    kv.reserve_external = broken


def ignores_promises(kv: Any) -> None:
    """Everybody may take every free block."""
    kv._promises.available = lambda key: kv.num_free_blocks


def ignores_slack(kv: Any) -> None:
    """Sharing a block that a promise expects back costs nothing."""
    kv.pool.slack._set = lambda block: None
    kv.pool.slack.growth = lambda blocks, extra_expected=0: 0


def loses_a_hold(kv: Any) -> None:
    """A lease ends without giving its blocks back."""
    drop = kv.pool.drop
    kv.pool.drop = lambda holder: (
        kv.pool._holds.pop(holder, None) and 0
        if isinstance(holder, tuple) and holder[0] == "lease"
        else drop(holder)
    )


PATCHES = [publishes_early, forgets_steps, drops_too_much, publishes_uncommitted]
PATCHES += [ignores_promises, ignores_slack, loses_a_hold]
