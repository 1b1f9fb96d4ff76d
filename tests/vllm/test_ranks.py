"""Two ranks, each a process with half of the heads: the answers are those of one."""

import random
import re
from pathlib import Path

import pytest

from disagg.messages.sampling import SampledToken, SamplingParams
from disagg.workers.pool_region import PoolRegion
from tests.checkpoints import make_checkpoint, reference_generate
from tests.vllm.engines import VLLM_SHAPE, make_vllm
from tests.vllm.serving import Serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

NUM_TOKENS = 8
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, num_logprobs=0)
SAMPLED = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, top_p=0.95, seed=3)


def test_two_ranks_answer_as_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path, "gemma3", window=40, **VLLM_SHAPE)
    rng = random.Random(1)
    prompts = {str(length): [rng.randrange(7, 320) for _ in range(length)] for length in (5, 90)}
    answers = []
    for num_ranks in (1, 2):
        engine = make_vllm(tmp_path, 100, tensor_parallel=num_ranks)
        serving = Serving(engine, 37)
        for name, prompt in prompts.items():
            serving.submit(name, prompt, GREEDY)
            serving.submit(f"{name}-sampled", prompt, SAMPLED)
        serving.run()
        answers.append({name: serving.tokens(name) for name in serving.samples})
        for name, prompt in prompts.items():
            tokens, logprobs, _ = reference_generate(tmp_path, prompt, NUM_TOKENS)
            assert serving.tokens(name) == tokens
            assert serving.logprobs(name) == pytest.approx(logprobs, abs=1e-4)
    assert answers[0] == answers[1]
    assert not isinstance(engine.region, PoolRegion)
    assert engine.region.num_ranks == 2
    pages = engine.layout.groups[0].spec.attention_pages()
    assert pages is not None
    assert pages.num_kv_heads == 1  # control: each has half of the two
    said = capfd.readouterr().err  # of the ranks' processes
    for rank in range(2):
        for phase in ("weights", "KV pool", "warm-up"):
            assert re.search(rf"{phase} of rank {rank}: [0-9.]+ s, .+ in use", said)


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
