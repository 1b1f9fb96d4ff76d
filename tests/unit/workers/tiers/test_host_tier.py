"""The host memory tier: bounded from the start, and copies beside each other."""

import numpy as np
import pytest

from disagg.errors import ConfigError
from disagg.workers.tiers.host_tier import HostTier
from disagg.workers.tiers.options import EvictionPolicy, TierOptions
from tests.unit.workers.tiers.stored_blocks import (
    BLOCK_BYTES,
    CONTRACT,
    key_of,
    on_threads,
    read,
    write,
)

A, B, C, D, E = (key_of(number) for number in range(5))


def host_tier(num_blocks: int, eviction: EvictionPolicy = "lru") -> HostTier:
    options = TierOptions("host", "host", "", num_blocks * BLOCK_BYTES, eviction=eviction)
    return HostTier(options, CONTRACT)


def test_a_block_comes_back_as_it_was_written() -> None:
    tier = host_tier(3)
    assert tier.known() == ()
    assert write(tier, [A, B, (7, A[1])]) == ([A, B, (7, A[1])], [])
    assert read(tier, [B, A, C, (7, A[1])]) == [True, True, False, True]
    assert tier.known() == (B, A, (7, A[1]))
    assert tier.counts()["gone"] == 1


@pytest.mark.parametrize(("eviction", "first_out"), [("lru", B), ("fifo", A)])
def test_a_full_tier_gives_up_what_goes_first(
    eviction: EvictionPolicy, first_out: tuple[int, bytes]
) -> None:
    tier = host_tier(3, eviction)
    write(tier, [A, B, C])
    read(tier, [A])
    assert write(tier, [D]) == ([D], [first_out])
    assert read(tier, [first_out, D]) == [False, True]


def test_more_than_it_holds_keeps_the_last_and_says_so() -> None:
    tier = host_tier(2)
    assert write(tier, [A, B, C, D]) == ([C, D], [A, B])
    assert read(tier, [A, B, C, D]) == [False, False, True, True]


def test_forgotten_blocks_leave_room() -> None:
    tier = host_tier(2)
    write(tier, [A, B])
    tier.forget([A, C])
    assert write(tier, [D]) == ([D], [])
    assert read(tier, [A, B, D]) == [False, True, True]


def test_a_slot_that_is_read_is_given_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when its block is evicted, nor when it is forgotten: one slot only, and it is read."""
    tier = host_tier(1)
    write(tier, [A])
    real = np.copyto

    def copyto(to: object, source: object) -> None:
        monkeypatch.setattr(np, "copyto", real)
        assert write(tier, [B]) == ([], [])
        tier.forget([A])
        assert write(tier, [B]) == ([], [])
        real(to, source)  # type: ignore[arg-type]

    monkeypatch.setattr(np, "copyto", copyto)
    assert read(tier, [A]) == [True]
    assert write(tier, [B]) == ([B], [])
    assert read(tier, [A, B]) == [False, True]
    assert tier.counts()["busy"] == 2


def test_a_copy_that_fails_loses_no_slot() -> None:
    tier = host_tier(1)
    with pytest.raises(ValueError, match="broadcast"):
        tier.write([(A, memoryview(b"too short"))])
    assert write(tier, [A]) == ([A], [])


def test_threads_beside_each_other_never_see_a_wrong_byte() -> None:
    tier = host_tier(4)
    keys = [key_of(number) for number in range(8)]

    def work(offset: int) -> None:
        for i in range(300):
            write(tier, [keys[(i + offset) % 8], keys[(i * 3 + offset) % 8]])
            read(tier, [keys[(i * 3 + offset) % 8], keys[(i * 5) % 8]])
            if i % 7 == 0:
                tier.forget([keys[i % 8]])

    on_threads(work)
    assert len(tier.known()) <= 4
    tier.forget(keys)
    assert write(tier, [A, B, C, D]) == ([A, B, C, D], [])  # no slot was lost


@pytest.mark.parametrize(
    ("size", "available", "place"), [(BLOCK_BYTES - 1, None, ""), (1 << 20, 1 << 19, "")]
)
def test_memory_that_is_not_there_is_refused(size: int, available: int | None, place: str) -> None:
    with pytest.raises(ConfigError, match=f"size={size} bytes"):
        HostTier(TierOptions("host", "host", place, size), CONTRACT, available_bytes=available)


def test_a_place_is_refused() -> None:
    with pytest.raises(ConfigError, match="no place"):
        HostTier(TierOptions("host", "host", "/tmp", 1 << 20), CONTRACT)


def test_emptied_it_has_all_its_room() -> None:
    tier = host_tier(2)
    write(tier, [A, B])
    tier.clear()
    assert tier.known() == ()
    assert write(tier, [C, D]) == ([C, D], [])
