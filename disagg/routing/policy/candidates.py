"""The ready workers of a revision and what they hold of a prompt: all at once, or one by one."""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, overload

from disagg.messages.identity import Incarnation
from disagg.routing.estimates.speeds import Speeds
from disagg.routing.fleet_hits import FleetHits
from disagg.routing.policy.protocol import Candidate, Demand
from disagg.routing.roster import Roster
from disagg.routing.worker_bits import bits_of, is_single

if TYPE_CHECKING:  # or each command would import numpy
    from disagg.routing.levels import Level

LOADERS_MAX = 8
"""Workers who are asked for one order what loading saves: each has its own price, and to find out
what one would read takes some 50 us where a thousand hold parts of the prompt."""


class Candidates(Sequence[Candidate]):
    """Workers as bits of ints, which are combined and searched for all workers at once.

    It is a sequence of `Candidate` as well, by `Worker.order`; but to make and look at each of a
    thousand takes some milliseconds, in which every token stream stands still. Valid until a worker
    changes.

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
        self._known: dict[int, Candidate] = {}

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

    def sparing(self, bits: int) -> "Candidates":
        """The same, but these have no room while another one can do all of the request."""
        others = self.can_prefill & self.can_decode & ~bits
        return self.only(~bits) if others and bits & self.everybody else self

    def of_bit(self, bit: int) -> Candidate:
        """The candidate that this bit stands for; always one object, as it learns what it has."""
        known = self._known.get(bit)
        if known is None:
            worker = self._roster.worker(bit)
            known = self._known[bit] = Candidate(
                worker,
                self._hits.part_of(worker.info.incarnation),
                bool(bit & self.can_prefill),
                bool(bit & self.can_decode),
            )
        return known

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
        found &= ~self.of(demand.bad_pairs.others(one.incarnation))
        for pair in demand.exclusions.pairs:
            if one.incarnation in pair:
                found &= ~self.of(pair)
        return found | self.of([one.incarnation])

    def with_partners(self, bits: int, others: int) -> int:
        """Of these workers those that can exchange KV with one of the others, by contracts."""
        return self._roster.with_partners(bits, others)

    def by_saved_tokens(self, bits: int) -> "Iterator[Level]":
        """These workers by `Candidate.saved_tokens`, the most first, those with none last.

        Of at most `LOADERS_MAX` workers it is found out what loading saves, see `loaders`; the
        others stand as if their tiers had nothing.
        """
        usable, loading = self._hits.usable(), self._loading(bits)
        tokens, mask = next(usable, (0, 0))
        reach, loaders = next(loading, (0, []))
        asked = 0
        priced: list[tuple[int, int]] = []
        """Of those who were asked what they save, negative, and their bits; a heap."""
        while bits:
            most = max(tokens, -priced[0][0] if priced else 0)
            if reach >= most and reach:  # somebody may be better by its tiers
                for one in loaders:
                    asked |= one
                    heappush(priced, (-self.of_bit(one).saved_tokens, one))
                reach, loaders = next(loading, (0, []))
                continue
            if not most:  # whose tiers are too slow stand with those that have nothing
                break
            found = 0
            if tokens == most:
                found = mask & ~asked
                tokens, mask = next(usable, (0, 0))
            while priced and -priced[0][0] == most:
                found |= heappop(priced)[1]
            if found := found & bits:
                yield most, found
                bits ^= found
        if bits:
            yield 0, bits

    def most_saved(self, bits: int) -> "Level":
        """The first level of `by_saved_tokens`; nobody at 0 tokens where there are no workers."""
        return next(self.by_saved_tokens(bits), (0, 0))

    def loaders(self, bits: int, reach_min: int) -> Iterator[Candidate]:
        """Of these workers at most `LOADERS_MAX` whose tiers have more than their pools.

        Those who reach furthest, of these who have most in their pools, of these the least loaded.

        Args:
            bits: of the workers.
            reach_min: tokens; who reaches less is not looked for.
        """
        for reach, found in self._loading(bits):
            if reach < reach_min:
                return
            yield from map(self.of_bit, found)

    def _loading(self, bits: int) -> Iterator[tuple[int, list[int]]]:
        """Tokens that tiers reach, most first, and bits of `loaders`; some levels are of nobody."""
        num_left = LOADERS_MAX
        for reach, mask in self._hits.loading():
            mask &= bits
            all_asked = mask.bit_count() <= num_left
            found = list(bits_of(mask) if all_asked else islice(self._by_price(mask), num_left))
            num_left -= len(found)
            yield reach, found
            if not num_left:
                return

    def _by_price(self, bits: int) -> Iterator[int]:
        """Workers of the same reach, as far as their prices can be told without asking each."""
        for _, mask in self._hits.usable():
            if found := mask & bits:
                yield from self._by_decode_load(found)
                bits ^= found
                if not bits:
                    return
        yield from self._by_decode_load(bits)

    def _by_decode_load(self, bits: int) -> Iterator[int]:
        for _, equal in self._roster.decode_loads.within(bits):
            yield from (equal,) if is_single(equal) else self._roster.in_order(equal)

    def by_prefill_order(self, bits: int) -> Iterator[Candidate]:
        """These workers by `Candidate.prefill_order`."""
        for _, level in self.by_saved_tokens(bits):
            for _, equal in self._roster.prefill_queues.within(level):
                first = self._roster.first(equal)
                yield self.of_bit(first)
                yield from map(self.of_bit, self._roster.in_order(equal ^ first))

    def shortest_queue(self, bits: int) -> Candidate:
        """Of these workers the first by `Candidate.prefill_queue`, then by `Worker.order`."""
        return self.of_bit(self._roster.first(self._roster.prefill_queues.lowest(bits)))

    def shortest_queues(self, bits: int, num: int) -> Iterator[Candidate]:
        """Of these workers the first ``num`` in the same order."""
        queues = self._roster.prefill_queues.within(bits)
        ordered = (bit for _, equal in queues for bit in self._roster.in_order(equal))
        return map(self.of_bit, islice(ordered, num))

    def least_loaded(self, bits: int) -> Candidate:
        """Of these workers the first by `Candidate.decode_load`, then by `Worker.order`."""
        found, load = 0, None
        for (num_requests, _), mask in self._roster.decode_loads.within(bits):
            if load is not None and num_requests != load:
                break
            found, load = found | mask, num_requests
        return self.of_bit(self._roster.first(found))

    def first_to_decode(self, bits: int) -> Candidate:
        """Of these workers the first by `Candidate.decode_order`."""
        equal = self._roster.decode_loads.lowest(bits)
        if equal & (equal - 1):
            visible = (found for _, mask in self._hits.always_visible() if (found := mask & equal))
            equal = next(visible, equal)
        return self.of_bit(self._roster.first(equal))
