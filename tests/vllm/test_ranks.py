"""Two ranks, each a process with half of the heads: the answers are those of one."""

import json
import os
import random
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer

from disagg.cluster.processes import find_children
from disagg.grammar.json_grammars import json_grammar
from disagg.messages.sampling import SampledToken, SamplingParams
from disagg.workers.pool_region import PoolRegion
from tests.checkpoints import EOS_ID, reference_generate
from tests.vllm.engines import make_vllm, shared_memory
from tests.vllm.families import make_family
from tests.vllm.serving import Serving

if TYPE_CHECKING:
    from disagg.workers.engines.vllm.vllm_engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

NUM_TOKENS = 8
GAP_MIN = 1e-3
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, num_logprobs=0)
SAMPLED = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, top_p=0.95, seed=3)
LENGTHS = (30, 93, 157)
"""Of prompts: beyond a window of 40, a chunk of 64; each answer needs one more block."""


def clear_prompt(directory: Path, length: int) -> tuple[list[int], list[int], list[float]]:
    """A prompt that the reference is clear about, with its tokens and their logprobs."""
    for attempt in range(50):
        rng = random.Random(f"{length}/{attempt}")
        prompt = [rng.randrange(7, 320) for _ in range(length)]
        tokens, logprobs, gap = reference_generate(directory, prompt, NUM_TOKENS)
        if gap > GAP_MIN:
            return prompt, tokens, logprobs
    raise AssertionError(f"no clear prompt of {length} tokens")


def compiled(engine: "VllmEngine") -> list[int]:
    """Of each rank how many functions torch has compiled."""

    def count(_: object) -> int:  # pickled by value: the ranks do not know this file
        from torch._dynamo.utils import counters

        return counters["frames"]["total"]

    counts: list[int] = engine._ranks._executor.collective_rpc(count)
    return counts


@pytest.mark.parametrize("family", ["gemma3", "llama4", "nemotron_h"])
def test_two_ranks_answer_as_one(
    tmp_path: Path, family: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """In chunks, after prefix hits, preempted."""
    make_family(tmp_path, family, window=40)
    expected = {str(length): clear_prompt(tmp_path, length) for length in LENGTHS}
    answers, pages = [], []
    for num_ranks in (1, 2):
        engine = make_vllm(tmp_path, 100, tensor_parallel=num_ranks)
        pages.append(max(group.spec.page_bytes for group in engine.layout.groups))
        groups, num_preemptions = len(engine.layout.groups), 0
        for num_blocks, max_step_tokens in ((0, 37), (6, 64), (8, 64)):
            serving = Serving(engine, max_step_tokens, num_blocks=num_blocks * groups)
            for number in range(2):
                for name, (prompt, _, _) in expected.items():
                    serving.submit(f"{name}-{number}", prompt, GREEDY)
                    serving.submit(f"{name}-{number}-sampled", prompt, SAMPLED)
                serving.run()
                for name, (_, tokens, logprobs) in expected.items():
                    assert serving.tokens(f"{name}-{number}") == tokens
                    found = serving.logprobs(f"{name}-{number}")
                    assert found == pytest.approx(logprobs, abs=1e-4)
            hits = serving.first_starts(["157-1", "157-1-sampled"])
            assert num_blocks or max(hits) > 0
            num_preemptions += serving.core.batcher.num_preemptions
            answers.append({name: serving.tokens(name) for name in serving.samples})
        assert num_preemptions
        assert compiled(engine) == [0] * num_ranks  # it takes ten seconds, of the first request
    assert all(answer == answers[0] for answer in answers)
    assert not isinstance(engine.region, PoolRegion)
    assert engine.region.num_ranks == 2
    assert 2 * pages[1] == pages[0]  # control: each has half of the heads
    said = capfd.readouterr().err  # of the ranks' processes
    for rank in range(2):
        for phase in ("weights", "KV pool", "warm-up"):
            assert re.search(rf"{phase} of rank {rank}: [0-9.]+ s, .+ in use", said)


def test_queues_leave_no_sockets_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_family(tmp_path, "gemma3", window=40)
    with tempfile.TemporaryDirectory() as folder:  # the test's own one has too long a name
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setenv("TMPDIR", folder)
        serving = Serving(make_vllm(tmp_path, 100, tensor_parallel=2), 64)
        serving.submit("one", list(range(10, 80)), GREEDY)
        serving.run()
        assert len(serving.tokens("one")) == NUM_TOKENS
        left = [path for path in Path(folder).rglob("*") if path.is_socket()]
    assert left == []


def test_ranks_leave_no_shared_memory_behind(tmp_path: Path) -> None:
    """Whichever way they end: what they share has no names any more while they run."""
    make_family(tmp_path, "gemma3", window=40)
    before = find_children(os.getpid())
    serving = Serving(make_vllm(tmp_path, 100, tensor_parallel=2), 64)
    serving.submit("one", list(range(10, 80)), GREEDY)
    serving.run()
    assert len(serving.tokens("one")) == NUM_TOKENS
    mapped = shared_memory(child.pid for child in find_children(os.getpid()) - before)
    assert len(mapped) >= 5  # control: three queues at least, and sums of two ranks
    assert {name for name in mapped if not name.endswith(" (deleted)")} == set()


def test_each_rank_knows_the_grammar(tmp_path: Path) -> None:
    """They draw from the same masks, also after the sequence began anew."""
    make_family(tmp_path, "llama4", window=40)
    prompt = [(3 * i) % 89 + 7 for i in range(70)]
    guided = SamplingParams(
        max_tokens=40,
        temperature=1.0,
        seed=5,
        stop_token_ids=(EOS_ID, 6),
        num_prompt_tokens=len(prompt),
        grammar=json_grammar(
            {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 3, "maxItems": 4}
        ),
    )
    answers = []
    for num_ranks in (1, 2):
        serving = Serving(make_vllm(tmp_path, 100, tensor_parallel=num_ranks), steps_max=2)
        serving.submit("whole", prompt, guided)
        serving.run()
        tokens = serving.tokens("whole")
        serving.submit("rest", prompt + tokens[:5], guided)
        serving.run()
        assert serving.tokens("rest") == tokens[5:]
        answers.append(tokens)
    assert answers[0] == answers[1]
    text: Any = AutoTokenizer.from_pretrained(tmp_path).decode(answers[0][:-1])
    assert set(json.loads(text)) <= {"red", "blue"}


@pytest.mark.parametrize("second", [(5, 6), (5, 7)])
def test_ranks_that_draw_different_tokens_are_noticed(second: tuple[int, int]) -> None:
    """Each rank goes on from its own: its KV would be another sequence's."""
    from disagg.workers.engines.vllm.rank import Ranks

    answers = [
        ({name: SampledToken(token) for name, token in zip("ab", tokens, strict=True)}, "")
        for tokens in ((5, 6), second)
    ]

    class Executor:
        def collective_rpc(self, *_: object, **__: object) -> object:
            return answers

    ranks = Ranks(Executor(), 2, "127.0.0.1")
    if second == (5, 6):
        assert ranks.run(None, {}, None) == answers[0]  # type: ignore[arg-type]
    else:
        with pytest.raises(RuntimeError, match="different tokens"):
            ranks.run(None, {}, None)  # type: ignore[arg-type]
