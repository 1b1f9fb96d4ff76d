"""What the coordinator knows of one sequence besides its tables."""

from dataclasses import dataclass

from disagg.kv.request import KVRequest


@dataclass(slots=True)
class SequenceState:
    """A sequence with tables.

    Attributes:
        request: its tokens and hashes, grown by the caller.
        num_computed: tokens computed or scheduled, external ones included.
        num_external: set while the tokens up to it are not valid yet.
        room_end: tokens for which every table has room.
        quiet_end: up to so many tokens no table changes, so that a decode step between two
            block ends costs a comparison.
        publish_from: below so many computed tokens there is nothing new to publish.
        kept: hit lengths at which windows and states stay findable (see ``Retention``).
    """

    request: KVRequest
    num_computed: int
    num_external: int | None = None
    room_end: int = 0
    quiet_end: int = 0
    publish_from: int = 0
    kept: tuple[int, ...] = ()
