"""The ready workers of a revision and what they hold of a prompt: all at once, or one by one."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import TYPE_CHECKING, overload

from disagg.messages.identity import Incarnation
from disagg.routing.estimates.speeds import Speeds
from disagg.routing.fleet_hits import FleetHits, joined
from disagg.routing.policy.protocol import Candidate, Demand
from disagg.routing.roster import Roster
from disagg.routing.worker_bits import bits_of

if TYPE_CHECKING:  # or each command would import numpy
    from disagg.routing.levels import Level


class Candidates(Sequence[Candidate]):
    """Workers as bits of ints, which are combined and searched for all workers at once.

    It is a sequence of `Candidate` as well, by id; but to make and look at each of a thousand takes
    some milliseconds, in which every token stream stands still. Valid until a worker changes.

    Args:
        roster: the workers.
        hits: what they hold of the prompt.
        everybody: the workers that are ready.
        can_prefill: those with room for the prompt and one token more; others can be pulled from.
        can_decode: those with room up to the request's last token.
        speeds: what was measured of them.
    """

    def __init__(
        self,
        roster: Roster,
        hits: FleetHits,
        everybody: int,
        can_prefill: int,
        can_decode: int,
        speeds: Speeds | None = None,
    ) -> None:
        self._roster = roster
        self._hits = hits
        self.everybody = everybody
        self.can_prefill = can_prefill
        self.can_decode = can_decode
        self.speeds = speeds or Speeds()

    def __len__(self) -> int:
        return self.everybody.bit_count()

    def __iter__(self) -> Iterator[Candidate]:
        return map(self.of_bit, self._roster.in_order(self.everybody))

    @overload
    def __getitem__(self, number: int) -> Candidate: ...
    @overload
    def __getitem__(self, number: slice) -> list[Candidate]: ...
    def __getitem__(self, number: int | slice) -> Candidate | list[Candidate]:
        return list(self)[number]

    def only(self, bits: int) -> "Candidates":
        """The same, but the others have no room; they can still be pulled from."""
        can_prefill, can_decode = self.can_prefill & bits, self.can_decode & bits
        return Candidates(
            self._roster, self._hits, self.everybody, can_prefill, can_decode, self.speeds
        )

    def of_bit(self, bit: int) -> Candidate:
        """The candidate that this bit stands for."""
        worker = self._roster.worker(bit)
        return Candidate(
            worker,
            self._hits.part_of(worker.info.incarnation),
            bool(bit & self.can_prefill),
            bool(bit & self.can_decode),
        )

    def of(self, workers: Iterable[Incarnation]) -> int:
        """Bits of those of these workers that are candidates."""
        return self._roster.bits.of(workers) & self.everybody

    def with_role(self, role: str) -> int:
        """Who prefills, or who decodes: workers with only this role, and those with both."""
        return self._roster.with_role(role) & self.everybody

    def handing_over(self, num_tokens: int) -> int:
        """Who may take part in the hand-over of a prompt of this length."""
        return self._roster.handover_tokens.at_least(num_tokens) & self.everybody

    def partners(self, one: Candidate, demand: Demand) -> int:
        """Between whom and this worker KV may move, by contracts and by what failed; itself too."""
        found = self._roster.exchanging(one.info.contract) & self.everybody
        for pairs in (demand.exclusions.pairs, demand.bad_pairs):
            for pair in pairs:
                if one.incarnation in pair:
                    found &= ~self.of(pair)
        return found | self.of([one.incarnation])

    @property
    def loading(self) -> int:
        """Those whose tiers have more of the prompt than their pools."""
        return self._hits.loading & self.everybody

    def by_saved_tokens(self, bits: int) -> "Iterator[Level]":
        """These workers by `Candidate.saved_tokens`, the most first, those with none last."""
        levels = self._hits.usable()
        if loading := self.loading & bits:
            # What loading costs is each one's own measurement.
            saved = sorted((-self.of_bit(bit).saved_tokens, bit) for bit in bits_of(loading))
            usable = ((tokens, mask & ~loading) for tokens, mask in levels)
            levels = joined([usable, ((-less, bit) for less, bit in saved)])
        for tokens, mask in levels:
            if not tokens:  # whose tiers are too slow stand with those that have nothing
                break
            if found := mask & bits:
                yield tokens, found
                bits ^= found
                if not bits:
                    return
        if bits:
            yield 0, bits

    def by_prefill_order(self, bits: int) -> Iterator[Candidate]:
        """These workers by `Candidate.prefill_order`."""
        for _, level in self.by_saved_tokens(bits):
            for _, equal in self._roster.prefill_queues.within(level):
                first = self._roster.first(equal)
                yield self.of_bit(first)
                yield from map(self.of_bit, self._roster.in_order(equal ^ first))

    def shortest_queue(self, bits: int) -> Candidate:
        """Of these workers the first by `Candidate.prefill_queue`, then by id."""
        return self.of_bit(self._roster.first(self._roster.prefill_queues.lowest(bits)))

    def shortest_queues(self, bits: int, num: int) -> Iterator[Candidate]:
        """Of these workers the first ``num`` in the same order."""
        queues = self._roster.prefill_queues.within(bits)
        ordered = (bit for _, equal in queues for bit in self._roster.in_order(equal))
        return map(self.of_bit, islice(ordered, num))

    def least_loaded(self, bits: int) -> Candidate:
        """Of these workers the first by `Candidate.decode_load`, then by id."""
        loads = groupby(self._roster.decode_loads.within(bits), key=lambda one: one[0][0])
        _, equal = next(loads)
        found = 0
        for _, mask in equal:
            found |= mask
        return self.of_bit(self._roster.first(found))

    def first_to_decode(self, bits: int) -> Candidate:
        """Of these workers the first by `Candidate.decode_order`."""
        equal = self._roster.decode_loads.lowest(bits)
        if equal & (equal - 1):
            visible = (found for _, mask in self._hits.always_visible() if (found := mask & equal))
            equal = next(visible, equal)
        return self.of_bit(self._roster.first(equal))
