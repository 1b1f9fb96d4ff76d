"""Whose blocks a tier keeps: the contract that says what the bytes mean."""

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

from disagg.messages.registration import Contract

FORMAT = 1
"""Version of what is stored: contract, header of a block, names. Another one is a foreign store."""


_OF_TRANSFERS = ("wire_", "checksums")
"""How the names of those fields of a contract begin that say nothing of a block's bytes."""
PARTS = "rank-*-of-*"
"""Names of the stores of ranks, as a pattern."""


def place_of_rank(place: str, rank: int, num_ranks: int) -> str:
    """Where in a store at a directory or URL a rank keeps its parts of blocks: a store of its own.

    Whole blocks, of one rank, are at the place itself.
    """
    return place if num_ranks == 1 else f"{place.rstrip('/')}/rank-{rank}-of-{num_ranks}"


@dataclass(frozen=True)
class TierContract:
    """What must be equal for a block's bytes to be of use.

    Model, types, groups, page format, and a value that tells hash keys apart: all that two workers
    must agree on before KV moves between them, but for what is said of the moving itself.

    Attributes:
        fields: by name, as JSON takes them; of a worker of several ranks the rank's number, too.
        block_bytes: of every block; of a rank's part of it.
    """

    fields: dict[str, Any]
    block_bytes: int

    @classmethod
    def of(cls, contract: Contract, rank: int = 0) -> "TierContract":
        """The contract with which a worker registers, as the tiers of one of its ranks see it."""
        fields = {k: v for k, v in asdict(contract).items() if not k.startswith(_OF_TRANSFERS)}
        of_rank = {} if contract.num_ranks == 1 else {"rank": rank}
        return cls(fields | of_rank, contract.block_bytes)

    def place_in(self, place: str) -> str:
        """See `place_of_rank`."""
        return place_of_rank(place, self.fields.get("rank", 0), self.num_ranks)

    @property
    def num_ranks(self) -> int:
        """Ranks that share blocks, and what a tier may take."""
        return int(self.fields["num_ranks"])

    @cached_property
    def digest(self) -> bytes:
        """32 bytes, part of the header of every stored block."""
        return sha256(self.as_json().encode()).digest()

    @cached_property
    def name(self) -> str:
        """Under which a store keeps its blocks apart from others': the digest's first half."""
        return self.digest.hex()[:32]

    def as_json(self) -> str:
        """The one text of it, with the format's version; equal contracts have equal texts."""
        return json.dumps({"format": FORMAT, "contract": self.fields}, sort_keys=True)
