"""Everything happens at the same moment: the one schedule in which back-off matters.

In each round every message arrives that was sent in the last one, steps and READs end, back-offs
grow shorter by one. Only the delays are free: who is refused draws one. With a single value two
workers try, refuse and back off together for ever; where anything may happen at any moment that
cannot be shown, as there one of them may always be faster.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

from disagg.checking.explorer.exploration import Step
from disagg.checking.explorer.moves import Moves
from disagg.checking.explorer.state import State, put


def rounds(moves: Moves, now: State) -> Iterator[Step[State]]:
    """One round, for each choice of delays."""
    for delays in product(moves.setting.delays, repeat=len(now.workers)):
        state, said, broken = now._replace(reads=(), on_way=(), down=((),) * len(now.down)), [], ""
        for side, delay in enumerate(delays):
            backed_off = moves.facts(now, side).backing_off
            wait = max(0, now.waits[side] - 1)
            retries = backed_off and not wait
            for method, *args in _events(moves, now, side, retries):
                step = _does(moves, state, side, method, *args)
                state, broken = step.state, broken or step.broken
                said.append(step.label)
            if moves.facts(state, side).backing_off and (retries or not backed_off):
                wait = delay
                said.append(f"{moves.names[side]} is refused, waits {delay}")
            state = state._replace(waits=put(state.waits, side, wait))
        yield Step("; ".join(said), state, broken)


def _events(moves: Moves, now: State, side: int, retries: bool) -> Iterator[tuple[Any, ...]]:
    """What happens to a worker in this round."""
    if retries:
        yield "tick", 0
    for index in now.down[side]:
        yield "on_router_message", 0, moves.messages[index]
    for index in now.on_way:
        envelope = moves.envelope(index)
        if envelope.to == moves.life_of(now, side):
            yield "on_peer_message", 0, envelope.sender, envelope.message
    if moves.facts(now, side).running is not None:
        yield ("ends",)
    for read in now.reads:
        if read.side == side:
            yield "on_read_done", read


def _does(moves: Moves, now: State, side: int, method: str, *args: Any) -> Step[State]:
    broken = ""
    if method == "on_read_done":
        (read,) = args
        now, broken = moves.lands(now, read, 0)
        args = 0, read.read_id, ""
    return moves.does(now, side, f"{method}{args[1:]}", method, *args, broken=broken)
