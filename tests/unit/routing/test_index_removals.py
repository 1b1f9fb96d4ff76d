"""The table of positions against a dict, and whole prompts that come and go against sets."""

import random
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from disagg.errors import InvariantViolation
from disagg.messages.identity import Incarnation
from disagg.messages.kv_events import AllCleared, BlocksRemoved, BlocksStored, KVEvent
from disagg.routing import buckets, chain_store, positions
from disagg.routing.buckets import Buckets
from disagg.routing.chain import OFFSET_BITS, Chain
from disagg.routing.chain_store import ChainStore
from disagg.routing.index import PrefixIndex
from disagg.routing.positions import PositionTable
from disagg.routing.worker_bits import WorkerBits
from tests.unit.routing.test_index import brute_force, group


def block_value(*numbers: int) -> bytes:
    return sha256(repr(numbers).encode()).digest()


def run_table(seed: int) -> None:
    """Chains of 60 blocks that come, move within their chain, and go."""
    chance, chains = random.Random(seed), [Chain(1) for _ in range(300)]
    table, known = PositionTable(chains), {}  # type: tuple[PositionTable, dict[bytes, int]]
    for turn in range(1200):
        number = chance.randrange(1, len(chains))
        chain, first = chains[number], number << OFFSET_BITS
        values = values_of(chain)
        match chance.randrange(3):
            case 0 if len(chain) < 60:
                end = len(chain)  # often the same as was there before
                named = [block_value(seed, number, i) for i in range(end, 60)]
                new = [one for one in named if one not in known] or [block_value(seed, turn, 1)]
                new = new[: chance.randint(1, 30)]
                again = chance.choice((list(known)[:1], new[:1], []))
                told = [*new, *again, block_value(seed, turn)]
                num = table.insert(told, b"".join(told), first + end)
                assert num == len(new) + (0 if again else 1) or num == MANY - 1 < len(new)
                chain.append(bytearray().join(told[:num]))
                known |= {one: first + end + i for i, one in enumerate(told[:num])}
            case 1 if values:  # the first ones leave, and the others move up
                num = chance.randint(1, len(values))
                packed = chain.packed(0, len(chain))
                chain.keep([(num, len(values))] if num < len(values) else [])
                table.remove(packed[: 32 * num], first)
                table.move(packed[32 * num :], first + num, first)
                for value in values[:num]:
                    del known[value]
                known |= {value: first + i for i, value in enumerate(values[num:])}
            case 2 if values:  # the last ones leave
                num = chance.randrange(len(values))
                packed = chain.packed(num, len(chain))
                chain.shorten(num)
                table.remove(packed, first + num)
                for value in values[num:]:
                    del known[value]
        if turn % 50 == 0:
            assert all(table.find(value) == at for value, at in known.items()), f"seed {seed}"
            unknown = [block_value(seed, -1, i) for i in range(30)]
            assert table.next_known(unknown, 0, 30) == 30, f"seed {seed}"
            some = [*unknown, *list(known)[-2:]]
            assert table.next_known(some, 0, len(some)) == min(30, len(some)), f"seed {seed}"


def values_of(chain: Chain) -> list[bytes]:
    return [chain.value(i) for i in range(len(chain))]


MANY = 6


@pytest.fixture
def _few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few values are worked on at once, wait, or fill a segment."""
    monkeypatch.setattr(positions, "_MANY", MANY)
    monkeypatch.setattr(buckets, "KEPT_MAX", MANY)
    monkeypatch.setattr(buckets, "_MANY", MANY)
    monkeypatch.setattr(positions, "_SORTED_MIN", 12)
    monkeypatch.setattr(positions, "_WAITING_MAX", 40)
    monkeypatch.setattr(buckets, "_SEGMENT_MAX", 100)


@pytest.mark.usefixtures("_few_are_many")
def test_the_table_equals_a_dict() -> None:
    for seed in range(5):
        run_table(seed)


@pytest.mark.usefixtures("_few_are_many")
@pytest.mark.parametrize("num_new", [1, MANY, 20])
@pytest.mark.parametrize("waits", [True, False])
def test_values_are_entered_up_to_the_first_known_one(num_new: int, waits: bool) -> None:
    """Whether that one waits to be entered, or one behind it does."""
    chains = [Chain(1) for _ in range(4)]
    table = PositionTable(chains)
    entered, waiting = ([block_value(1, i) for i in range(50)], [block_value(2, 1)])
    for number, values in enumerate((entered, waiting), 1):
        packed = bytearray().join(values)
        assert table.insert(values, packed, number << OFFSET_BITS) == len(values)
        chains[number].append(packed)
    new = [block_value(3, i) for i in range(num_new)]
    told = [*new, *(waiting + entered if waits else entered + waiting)]
    assert table.insert(told, b"".join(told), 3 << OFFSET_BITS) == num_new
    chains[3].append(bytearray().join(new))
    assert [table.find(value) for value in new] == [3 << OFFSET_BITS | i for i in range(num_new)]


def fill_and_empty(num: int) -> list[int]:
    """Numbers of entries that are found in the end, of values that share few buckets."""
    chance, kept = np.random.default_rng(num), Buckets()
    bits = chance.integers(1 << 63, size=num, dtype=np.uint64) << 1
    bits &= ~np.uint64(0x1F << 59 | 0x1F << 26)  # of 16 buckets, and 4 marks
    for begin in range(0, num, 300):
        some = bits[begin : begin + 300]
        kept.put(some, np.arange(begin, begin + len(some), dtype=np.uint64))
    gone = np.arange(0, num, 2, dtype=np.uint64)
    kept.take_out(bits[::2], gone)
    kept.move(bits[1::2], gone + 1, 1 << 20)
    found = [list(kept.positions(int(one))) for one in bits]
    assert kept.some_alike(bits) == [i for i, at in enumerate(found) if at]
    assert int(np.sum(kept._num_used)) == num // 2
    return [i for i, at in enumerate(found) if i % 2 and (1 << 20) + i in at]


def test_buckets_that_are_full_before_their_segment_are_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buckets, "_SPLIT_MIN", 0)
    assert fill_and_empty(2000) == list(range(1, 2000, 2))


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("_free_slot", lambda _, one, __: 8 * one),  # what is there is lost
        ("_put_at_once", lambda _, one, *__: one[:0]),
    ],
)
def test_control_buckets_that_lose_entries_are_found(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: Callable[..., Any]
) -> None:
    monkeypatch.setattr(Buckets, name, broken)
    with pytest.raises((AssertionError, InvariantViolation)):
        test_buckets_that_are_full_before_their_segment_are_split(monkeypatch)


def _clear_nothing(self: Buckets, *_: object) -> None:
    """As it was."""


def _leave_the_marks(self: Buckets, segment: int) -> None:
    """All entries are where they were, and also in a new segment, without marks."""
    split(self, segment)
    self._marks[-4096:] = bytes(4096)


split = Buckets._split


def _forget_what_waits(self: PositionTable) -> None:
    self._coming, self._coming_chains = {}, set()


def _look_at_none(self: PositionTable, values: Sequence[bytes], mixed: object) -> int:
    return len(values)


@pytest.mark.usefixtures("_few_are_many")
@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (Buckets, "move", _clear_nothing),
        (Buckets, "_split", _leave_the_marks),
        (PositionTable, "_settle", _forget_what_waits),
        (PositionTable, "_first_known", _look_at_none),
    ],
)
def test_control_a_broken_table_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, broken: Callable[..., Any]
) -> None:
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises((AssertionError, InvariantViolation)):
        test_the_table_equals_a_dict()


GROUPS = [group("full_attention"), group("sliding_window", 4, 70)]
WORKERS = [Incarnation(str(number), "1") for number in range(4)]
LENGTH = 120


def piece(chance: random.Random, blocks: list[bytes]) -> list[bytes]:
    """What one event removes: from the end or the root of a prompt, its end first or not."""
    num = chance.choice((1, 1, 32, len(blocks)))
    match chance.randrange(4):
        case 0:
            return blocks[:num]
        case 1:
            return blocks[-num:]
        case 2:
            return blocks[-num:][::-1]
        case _:
            return chance.sample(blocks, min(num, len(blocks)))


def come_and_go(seed: int, num_turns: int = 250) -> None:
    """Prompts that share beginnings come and go at every worker, as caches would tell it."""
    chance, index = random.Random(seed), PrefixIndex(GROUPS, 4)
    prompts = [
        [block_value(0 if i < 20 * (n % 3) else n, i) for i in range(LENGTH)] for n in range(6)
    ]
    held: dict[Incarnation, set[tuple[int, bytes]]] = {}
    for turn in range(num_turns):
        worker = chance.choice(WORKERS)
        if worker not in held:
            index.add(worker, 10_000)
            held[worker] = set()
        number, prompt = chance.randrange(2), chance.choice(prompts)
        there = [value for value in prompt if (number, value) in held[worker]]
        begin = chance.choice((0, 0, chance.randrange(LENGTH)))
        run = prompt[begin : begin + chance.choice((1, 64, LENGTH))]
        events: list[KVEvent] = [AllCleared()]
        match chance.choices(("store", "grow", "remove", "clear", "lost"), (40, 15, 60, 1, 1))[0]:
            case "store":
                events = [BlocksStored(number, tuple(run), prompt[begin - 1], 0, 4)]
                held[worker] |= {(number, value) for value in run}
            case "grow":  # block by block
                before = [prompt[begin - 1] if begin else None, *run[:-1]]
                events = [
                    BlocksStored(number, (value,), parent, 0, 4)
                    for parent, value in zip(before, run, strict=True)
                ]
                held[worker] |= {(number, value) for value in run}
            case "remove" if there:
                gone = piece(chance, there)
                events = [BlocksRemoved(number, tuple(gone))]
                if chance.randrange(2):  # block by block
                    events = [BlocksRemoved(number, (value,)) for value in gone]
                held[worker] -= {(number, value) for value in gone}
            case "lost":
                index.remove(worker)
                del held[worker]
                continue
            case _:
                held[worker].clear()
        assert index.apply(worker, index.next_sequence(worker), None, events)
        if turn % 5 == 0:
            check(index, held, chance.choice(prompts), f"seed {seed}, turn {turn}")
    for worker in held:
        index.remove(worker)
    assert not kept_chains(index), f"seed {seed}"


def kept_chains(index: PrefixIndex) -> list[Chain]:
    return [one for store in index._stores.values() for one in store.chains if one is not None]


def check(
    index: PrefixIndex, held: dict[Incarnation, set[Any]], prompt: list[bytes], where: str
) -> None:
    found = index.match(4 * LENGTH + 1, prompt)
    for worker, keys in held.items():
        usable, alone = brute_force(GROUPS, keys, 4 * LENGTH + 1, prompt, 4)
        assert found[worker].usable_tokens == usable, where
        assert found[worker].group_tokens == alone, where
        assert index.num_entries(worker) == len(keys), where
    assert index.num_blocks == len({value for keys in held.values() for _, value in keys}), where
    for chain in kept_chains(index):
        assert chain.num_lasting == len(chain), where
        assert 8 * (chain.num_dead - chain_store.DEAD_BLOCKS_MAX) <= len(chain), where


def test_prompts_that_come_and_go_equal_sets_of_keys() -> None:
    for seed in range(4):
        come_and_go(seed)


@pytest.mark.usefixtures("_few_are_many")
def test_also_where_few_changes_wait() -> None:
    for seed in range(4, 8):
        come_and_go(seed)


def _equal_as_far_as_it_goes(self: Chain, offset: int, values: Sequence[bytes], start: int) -> int:
    return min(offset + 1, len(values) - start)


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (Chain, "num_equal_back", _equal_as_far_as_it_goes),
        (ChainStore, "_tidy", lambda *_: None),
        (PositionTable, "remove", lambda *_: None),
    ],
)
def test_control_a_broken_removal_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, broken: Callable[..., Any]
) -> None:
    monkeypatch.setattr(owner, name, broken)
    monkeypatch.setattr(chain_store, "DEAD_BLOCKS_MAX", 0)
    with pytest.raises((AssertionError, InvariantViolation, IndexError, ValueError)):
        test_prompts_that_come_and_go_equal_sets_of_keys()


def tell_another_end() -> int:
    """What A can use of a prompt of which it removed the end, and told another one in its place."""
    index, worker = PrefixIndex(GROUPS[:1], 4), WORKERS[0]
    index.add(worker, 100)
    mine = [block_value(0, i) for i in range(4)]
    index.apply(worker, 0, None, [BlocksStored(0, tuple(mine), None, 0, 4)])
    assert index.match(17, mine)[worker].usable_tokens == 16
    other = (block_value(1, 2), mine[3])
    events: list[KVEvent] = [
        BlocksRemoved(0, tuple(mine[2:])),
        BlocksStored(0, other, mine[1], 8, 4),
    ]
    index.apply(worker, 1, None, events)
    return index.match(17, mine)[worker].usable_tokens


def test_what_was_proven_of_an_end_goes_with_it() -> None:
    assert tell_another_end() == 8


def test_control_a_proof_that_stays_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten = Chain.shorten

    def keep_the_proof(self: Chain, num: int) -> None:
        proven = self._proven
        shorten(self, num)
        self._proven = proven

    monkeypatch.setattr(Chain, "shorten", keep_the_proof)
    assert tell_another_end() == 16


def test_a_lost_worker_is_taken_out_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier of half a million blocks at once would stop all streams for a tenth of a second."""
    monkeypatch.setattr("disagg.routing.index._LOST_BLOCKS", 1)
    bits = WorkerBits()
    index, (lost, other, *_) = PrefixIndex(GROUPS, 4, bits), WORKERS
    prompts = [[block_value(n, i) for i in range(20)] for n in range(6)]
    for worker in (lost, other):
        index.add(worker, 10_000)
        for number, prompt in enumerate(prompts if worker == lost else prompts[5:]):
            blocks = tuple(prompt[: 10 if worker == lost else 20])
            stored = [BlocksStored(group, blocks, None, 0, 4) for group in range(2)]
            assert index.apply(worker, 2 * number, None, stored)
    bit = bits.of_one(lost)
    index.remove(lost)
    assert len(kept_chains(index)) > 1  # the rest of it is there still
    for num_parts in range(7):
        for prompt in prompts:
            hits = index.match(81, prompt)
            assert all(not mask & bit for one in hits.alone for _, mask in one)
            assert [hits[other].usable_tokens, *hits] == [80 if prompt == prompts[5] else 0, other]
        if num_parts == 2:  # the same one again, and nothing is known of it
            index.add(lost, 10_000)
            assert bits.of_one(lost) != bit
            assert index.match(81, prompts[5])[lost].usable_tokens == 0
            index.remove(lost)
        index.apply(other, 0, None, [])
    assert index.num_blocks == 20
    assert bits.add(lost) == bit
