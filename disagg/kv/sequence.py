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
        quiet_end: up to so many tokens no table changes, so that a decode step between two
            block ends costs a comparison.
        publish_from: below so many computed tokens there is nothing new to publish.
    """

    request: KVRequest
    num_computed: int
    num_external: int | None = None
    quiet_end: int = 0
    publish_from: int = 0
