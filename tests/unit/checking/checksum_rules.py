"""Rules of checksums, taken away from whole workers."""

from tests.unit.checking import checksum_mutants as mutants
from tests.unit.checking.taken_away import without

CHECKSUM_RULES = (
    without(
        "a block whose checksum differs has not arrived",
        "pair-checksums",
        18,
        "decode: hears CommitAnswer: the cache offers 'flipped bits' as 'KV of 5 6'",
        mutants={"inbound": mutants.ComparesNothing},
    ),
    without(
        "a block whose checksum differs has not arrived, of a prefix pull either",
        "chain-checksums",
        9,
        "prefill: hears CommitAnswer: the cache offers 'flipped bits' as 'KV of 5'",
        mutants={"inbound": mutants.ComparesNothing},
    ),
    without(
        "a commit is sent only when every checksum is known",
        "pair-checksums",
        17,
        "decode: hears CommitAnswer: the cache offers 'flipped bits' as 'KV of 5 6'",
        mutants={"inbound": mutants.CommitsBeforeTheyAreKnown},
    ),
)
