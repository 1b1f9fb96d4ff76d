"""A prompt, a long one that evicts it, and both again out of tiers: real engine, real stores."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

import pytest

from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.messages.outputs import SequenceOutput
from disagg.workers.tiers.disk_store import DiskStore
from disagg.workers.tiers.stored_block import HEADER_BYTES, block_name
from tests.checkpoints import make_checkpoint, reference_generate
from tests.unit.workers.tiers.engine_worker import Blocks, EngineWorker

NUM_WINDOWS = 5
"""Groups with a window; the sixth group keeps everything."""
NUM_ANSWER = 8
LOGPROB_TOLERANCE, GAP_MIN = 1e-4, 1e-3
Answer = list[SequenceOutput]


@dataclass(frozen=True)
class Scale:
    """Lengths of the two prompts, and of all else, in tokens; the pool in blocks."""

    short: int
    long: int
    block: int
    window: int
    step: int
    pool: int
    directory: Path = Path()

    def worker(self, *tiers: str, pool: int = 0) -> EngineWorker:
        return EngineWorker(self.directory, pool or self.pool, self.block, self.step, *tiers)

    def prompt(self, length: int) -> tuple[int, ...]:
        return tuple(random.Random(length).choices(range(7, 320), k=length))

    def hits(self, length: int) -> int:
        """The last block end before a prompt's last token."""
        return (length - 1) // self.block * self.block

    def stored(self, *lengths: int) -> int:
        """Blocks of each group that these prompts and their answers fill."""
        return sum((length + NUM_ANSWER - 1) // self.block for length in lengths)

    def in_window(self) -> int:
        """Blocks of a window that are seen at a block's end."""
        return -(-(self.window - 1) // self.block)


FOUNDING = Scale(10_007, 70_006, block=128, window=1_024, step=1_024, pool=700)
SMALL = Scale(107, 706, block=4, window=16, step=32, pool=250)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Scale:
    return with_checkpoint(SMALL, tmp_path_factory.mktemp("small"))


def with_checkpoint(scale: Scale, folder: Path) -> Scale:
    """The scale with a tiny Gemma-3 on disk: five layers with windows, one without."""
    directory = make_checkpoint(
        folder / "gemma3",
        "gemma3",
        window=scale.window,
        num_layers=NUM_WINDOWS + 1,
        layer_types=["sliding_attention"] * NUM_WINDOWS + ["full_attention"],
        max_position_embeddings=scale.long + 2 * scale.block,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
    )
    return Scale(**{**vars(scale), "directory": directory})


def fresh(scale: Scale, *lengths: int) -> list[Answer]:
    """Answers of a worker without tiers, in whose pool all fits and nothing is cached."""
    num_blocks = (NUM_WINDOWS + 1) * (sum(lengths) // scale.block + 2 * len(lengths)) + 1
    with scale.worker(pool=num_blocks) as worker:
        answers = [worker.serve(scale.prompt(length), NUM_ANSWER) for length in lengths]
        assert not [report for report in worker.reports() if report.hit_tokens]
    return answers


def assert_same(answer: Answer, expected: Answer) -> None:
    """Equal tokens, logprobs to 1e-4, and no token that a rounding could have chosen."""
    for (token, logprobs), (wanted, theirs) in zip(tokens(answer), tokens(expected), strict=True):
        assert theirs[0][1] - theirs[1][1] > GAP_MIN, "take another seed"
        assert token == wanted
        assert logprobs[0][1] == pytest.approx(theirs[0][1], abs=LOGPROB_TOLERANCE)


def tokens(answer: Answer) -> Iterator[tuple[int, tuple[tuple[int, float], ...]]]:
    for output in answer:
        yield from zip(output.token_ids, (one.top for one in output.logprobs), strict=True)


def hashes_of(scale: Scale, length: int) -> list[bytes]:
    hashes: list[bytes] = []
    BlockHasher(b"tiers", scale.block).extend(hashes, scale.prompt(length))
    return hashes


def lacking(worker: EngineWorker, scale: Scale, length: int) -> Counter[int]:
    """By group, what the longest prefix of a prompt needs, from the first that the pool lacks."""
    hashes = hashes_of(scale, length)
    num_blocks = scale.hits(length) // scale.block
    found = Counter[int]()
    for manager, group in zip(worker.kv.managers, worker.kv.layout.groups, strict=True):
        windowed = isinstance(group.spec, SlidingWindowSpec)
        first = num_blocks - scale.in_window() if windowed else 0
        needed = manager.chain(hashes)[first:num_blocks]
        found[manager.group] = len(list(dropwhile(manager.cached_blocks, needed)))
    return found


def on_disk(place: Path, worker: EngineWorker) -> Counter[int]:
    """By group, the blocks whose files are there, as large as they should be."""
    blocks = list(DiskStore(str(place), create=False).blocks())
    assert {one.num_bytes for one in blocks} <= {worker.kv.layout.block_bytes + HEADER_BYTES}
    return Counter(one.key[0] for one in blocks)


def per_group(number: int) -> Counter[int]:
    return Counter(dict.fromkeys(range(NUM_WINDOWS + 1), number))


def by_group(blocks: Blocks, *tiers: str) -> Counter[int]:
    found = Counter[int]()
    for (tier, group), number in blocks.items():
        found[group] += number if tier in tiers else 0
    return found


def play(scale: Scale, place: Path) -> None:
    """Play the four requests, and the last of them once more after a restart."""
    short, long = scale.short, scale.long
    expected = dict(zip((short, long), fresh(scale, short, long), strict=True))
    num_short, num_long = scale.hits(short) // scale.block, scale.hits(long) // scale.block
    num_full_windows = (NUM_WINDOWS + 1) * num_long
    assert scale.pool * 3 < num_full_windows, "not even a third of what full windows take"
    disk = f"disk:{place}?size=1GiB&slow_ms=600000"
    with scale.worker() as alone:
        block_bytes = alone.kv.layout.block_bytes
        assert [len(group.layers) for group in alone.kv.layout.groups] == [1] * (NUM_WINDOWS + 1)
    # Host memory has room for a part of the long prompt alone: what is older is on disk only.
    host = f"host?size={num_full_windows // 8 * block_bytes}B&slow_ms=600000"
    with scale.worker(host, disk) as worker:
        assert_same(worker.serve(scale.prompt(short), NUM_ANSWER), expected[short])
        assert on_disk(place, worker) == per_group(scale.stored(short))
        worker.during.clear()
        assert_same(worker.serve(scale.prompt(long), NUM_ANSWER), expected[long])
        assert not worker.read, "nothing to load so far"

        # Chunked: while a part of the prompt is computed, all parts before it have been written.
        prefill = [(start, blocks) for start, blocks in worker.during if start < long]
        assert [start for start, _ in prefill] == list(range(0, long, scale.step))
        for start, blocks in prefill:
            stored = scale.stored(short) + start // scale.block
            assert by_group(blocks, "disk") == per_group(stored), start
        assert on_disk(place, worker) == per_group(scale.stored(short, long))

        windows = per_group(scale.in_window())
        for length in (short, long):
            needed = lacking(worker, scale, length)
            if length == short:  # all of it was evicted
                assert needed == windows | Counter({NUM_WINDOWS: num_short})
            worker.read.clear()
            answer = worker.serve(scale.prompt(length), NUM_ANSWER)
            assert_same(answer, expected[length])
            report = worker.reports()[-1]
            assert report.hit_tokens == scale.hits(length)
            assert report.computed_tokens == length - scale.hits(length)
            assert by_group(worker.read, "host", "disk") == needed
            if length == short:
                assert by_group(worker.read, "disk") == needed, "host memory has forgotten it"
        assert on_disk(place, worker) == per_group(scale.stored(short, long)), "nothing twice"

    with scale.worker(disk) as worker:
        assert_same(worker.serve(scale.prompt(long), NUM_ANSWER), expected[long])
        assert worker.reports()[-1].hit_tokens == scale.hits(long)
        needed = windows | Counter({NUM_WINDOWS: num_long})
        assert by_group(worker.read, "disk") == needed
        # The windows' share: what full windows would read besides.
        assert sum(needed.values()) == num_long + NUM_WINDOWS * scale.in_window()
        assert not worker.counts.get("tier_blocks_missed_disk")


def test_both_come_back_into_a_pool_too_small_for_full_windows(
    small: Scale, tmp_path: Path
) -> None:
    for length in (small.short, small.long):  # what fresh workers are compared with elsewhere
        prompt = small.prompt(length)
        wanted, _, _ = reference_generate(small.directory, prompt, NUM_ANSWER)
        assert [token for token, _ in tokens(fresh(small, length)[0])] == wanted
    play(small, tmp_path / "kv")


def test_the_figures_of_the_founding_documents() -> None:
    scale = FOUNDING
    assert [scale.hits(length) for length in (scale.short, scale.long)] == [9_984, 69_888]
    assert [scale.hits(scale.long) // scale.block, NUM_WINDOWS * scale.in_window()] == [546, 40]


@pytest.mark.slow
def test_they_are_what_a_worker_does_at_that_scale(tmp_path: Path) -> None:
    """What `SMALL` does in every run, with the same checks and as many groups."""
    play(with_checkpoint(FOUNDING, tmp_path), tmp_path / "kv")


def test_without_tiers_all_is_computed_again(small: Scale) -> None:
    lengths = [small.short, small.long, small.short, small.long]
    with small.worker() as worker:
        for length in lengths:
            worker.serve(small.prompt(length), NUM_ANSWER)
        assert [report.hit_tokens for report in worker.reports()] == [0] * 4
        assert [report.computed_tokens for report in worker.reports()] == lengths


def test_the_answers_come_from_the_tiers_bytes(small: Scale) -> None:
    """Control: other bytes in host memory, which has no checksum, give other answers."""
    lengths = small.short, small.long
    expected = fresh(small, *lengths)
    with small.worker("host?size=256MiB&slow_ms=600000") as worker:
        for length in lengths:
            worker.serve(small.prompt(length), NUM_ANSWER)
        worker.host_memory()[:] = 0
        for length, right in zip(lengths, expected, strict=True):
            answer = worker.serve(small.prompt(length), NUM_ANSWER)
            assert worker.reports()[-1].hit_tokens == small.hits(length)
            with pytest.raises(AssertionError):
                assert_same(answer, right)


def test_a_damaged_block_shortens_what_is_loaded(small: Scale, tmp_path: Path) -> None:
    """What is loaded ends before it; the rest is computed."""
    place, short = tmp_path / "kv", small.short
    (expected,) = fresh(small, short)
    disk = f"disk:{place}?size=1GiB&slow_ms=600000"
    with small.worker(disk) as worker:
        assert_same(worker.serve(small.prompt(short), NUM_ANSWER), expected)
        num_intact = small.hits(short) // small.block - 10
        name = block_name((NUM_WINDOWS, hashes_of(small, short)[num_intact]))
    (damaged,) = place.rglob(name)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    with small.worker(disk) as worker:
        assert_same(worker.serve(small.prompt(short), NUM_ANSWER), expected)
        assert worker.reports()[-1].hit_tokens == num_intact * small.block
        assert worker.counts["tier_blocks_missed_disk"] == 1
        assert worker.store_counts("disk")["corrupt"] == 1
