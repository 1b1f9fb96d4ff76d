"""A worker's tier in a small world: each block is copied at any moment, and may not come whole.

After a reset of the prefix caches it is emptied at any moment, or cannot be.
"""

from collections.abc import Iterator

from disagg.checking.explorer.exploration import Step
from disagg.checking.explorer.memory import OLD, OTHER
from disagg.checking.explorer.moves import Moves
from disagg.checking.explorer.state import State, TierCopy, put


def tier_steps(moves: Moves, now: State) -> Iterator[Step[State]]:
    """What can happen next to the copies under way, each of one block, and to tiers."""
    for side in now.clears:
        yield from _clears(moves, now, side)
    if now.faults.resets < moves.setting.resets:
        yield Step("all prefix caches are to be reset", moves.resets(now))
    for copy in now.copies:
        others = now._replace(copies=tuple(one for one in now.copies if one != copy))
        name = f"{moves.names[copy.side]}: tier {'write' if copy.writes else 'read'}"
        if copy.content:
            yield _ends(moves, others, copy)
        elif copy.writes:
            content = moves.workers.memory[now.workers[copy.side]][copy.block]
            copied = copy._replace(content=content)
            yield Step(f"{name} of block {copy.block}: {content!r}", _with(others, copied))
        else:
            content = dict(now.stores[copy.side]).get(copy.key, OTHER)
            yield _lands(moves, others, copy._replace(content=content), f"{name} lands")
            if now.faults.tier_losses < moves.setting.tier_losses:
                faults = now.faults._replace(tier_losses=now.faults.tier_losses + 1)
                lost = others._replace(faults=faults)
                yield _lands(moves, lost, copy._replace(content=OTHER), f"{name} is damaged")


def _clears(moves: Moves, now: State, side: int) -> Iterator[Step[State]]:
    """A tier is emptied, or says why it is not."""
    after = now._replace(clears=tuple(one for one in now.clears if one != side))
    empty = after._replace(stores=put(after.stores, side, ()))
    yield moves.does(empty, side, "its tier is emptied", "on_tier_cleared", 0, "tier", "")
    errors = now.faults.clear_errors
    if errors < moves.setting.clear_errors:
        after = after._replace(faults=now.faults._replace(clear_errors=errors + 1))
        label = "its tier cannot be emptied"
        yield moves.does(after, side, label, "on_tier_cleared", 0, "tier", "an error")


def _lands(moves: Moves, others: State, copy: TierCopy, label: str) -> Step[State]:
    """A tier writes into the pool, whatever is there by now."""
    worker = moves.workers.write(others.workers[copy.side], copy.block, copy.content)
    after = others._replace(workers=put(others.workers, copy.side, worker))
    return Step(f"{label}: {copy.content!r} in {copy.block}", _with(after, copy))


def _ends(moves: Moves, others: State, copy: TierCopy) -> Step[State]:
    """The worker hears of it: a block that was damaged is a miss."""
    if not copy.writes:
        intact = (copy.content != OTHER,)
        return moves.does(
            others, copy.side, "a tier read ends", "on_tier_read", 0, copy.copy_id, intact
        )
    store = {copy.key: copy.content} | dict(others.stores[copy.side])  # once: it keeps the first
    after = others._replace(stores=put(others.stores, copy.side, tuple(sorted(store.items()))))
    known, broken = moves.known(copy.key[1]), ""
    if copy.content.removeprefix(OLD) != known:
        broken = f"a tier has {copy.content!r} as {known!r}"
    done = ("on_tier_written", 0, copy.copy_id, (copy.key,), ())
    return moves.does(after, copy.side, "a tier write ends", *done, broken=broken)


def _with(now: State, copy: TierCopy) -> State:
    return now._replace(copies=tuple(sorted((*now.copies, copy))))
