"""Which worker leaves next, when settings or counts have changed; no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Standing:
    """One worker, as the turnover sees it.

    Attributes:
        name: of its actor.
        is_wanted: the settings have such a worker; else it leaves for good.
        is_current: it runs with the settings as they are.
        serves: it answered last.
        is_leaving: it has been asked to end.
        is_awaited: it took the place of one that left and has not served yet.
        is_known: a router has registered it, and is connected to it.
        has_place: a host has room for it.
    """

    name: str
    is_wanted: bool = True
    is_current: bool = True
    serves: bool = True
    is_leaving: bool = False
    is_awaited: bool = False
    is_known: bool = True
    has_place: bool = True


def find_next_to_leave(workers: Sequence[Standing]) -> str | None:
    """The next worker that has to end, as it is not wanted or has old settings; None: not now.

    Who does not serve leaves first and at once. Of those that serve one at a time, once the last
    one's successor serves and a router has it: a bad setting costs one worker. And only while
    another one serves, unless none is to come.
    """
    to_leave = [each for each in workers if not (each.is_wanted and each.is_current)]
    stale = [each for each in to_leave if not each.is_leaving]
    idle = [each for each in stale if not each.serves]
    if idle:
        return idle[0].name
    if any(each.is_leaving or each.is_awaited for each in workers):
        return None
    staying = [each for each in workers if each.is_wanted and each.is_current]
    if any(each.serves and not each.is_known for each in staying):
        return None
    for each in sorted(stale, key=lambda each: each.is_known):
        others = [other for other in workers if other is not each]
        is_to_come = any(other.is_wanted and other.has_place for other in others)
        if any(other.serves for other in others) or not is_to_come:
            return each.name
    return None
