"""Families with chunks or states: vLLM's runner under our scheduler equals plain transformers.

Packed, in chunks, after a prefix hit, preempted, and continued from copies of its blocks.
"""

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from disagg.commands.plan import DeviceName, EngineName, MemoryReport
from disagg.errors import ConfigError
from disagg.messages.identity import RequestKey
from disagg.messages.sampling import SampledToken, SamplingParams
from disagg.scheduling.step import SequenceSlice, Step, TableChange
from tests.checkpoints import edit_config, make_checkpoint, reference_logits
from tests.vllm import families
from tests.vllm.engines import make_vllm
from tests.vllm.serving import Serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

NUM_TOKENS = 8
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, num_logprobs=0)
NUM_BLOCKS = 120
NAN = -1
"""As bytes: NaN in every type."""


@dataclass(frozen=True)
class Case:
    """A family as this page tries it.

    Attributes:
        block_tokens: of the layout, where its states ask for more than 32.
        tolerance: of logprobs, beside plain transformers in float32.
        same: of logprobs, beside the engine's own run of the same tokens in other chunks.
    """

    num_state_groups: int
    block_tokens: int = 32
    dtype: str = "float32"
    tolerance: float = 1e-4
    same: float = 1e-4


CASES = {
    "llama4": Case(0),
    "nemotron_h": Case(2),
    "granite_hybrid": Case(1, 96),
    "falcon_h1": Case(3),
    # vLLM's CPU kernels compute gated delta nets in bfloat16 alone: 8 bits of mantissa.
    "qwen3_next": Case(3, 1056, "bfloat16", tolerance=0.25, same=0.25),
}


@dataclass(frozen=True)
class Loaded:
    case: Case
    directory: Path
    engine: Any

    @property
    def lengths(self) -> tuple[int, ...]:
        """Around a block's end; a state moves on in the prompt, and while it decodes."""
        tokens = self.case.block_tokens
        return (1, tokens - 3, tokens, 2 * tokens + 7) if tokens < 100 else (1, 40, tokens - 3)

    def serving(self, **changed: Any) -> Serving:
        return Serving(self.engine, max_model_tokens=2200, **changed)

    def check(self, prompt: Sequence[int], samples: Sequence[SampledToken]) -> None:
        """Each token is the reference's best one, if two are not equally good."""
        tokens = [sample.token_id for sample in samples]
        assert len(tokens) == NUM_TOKENS
        logits = reference_logits(self.directory, [*prompt, *tokens])[len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1)
        best = logprobs.max(-1).values.tolist()
        right = [float(logprobs[at, token]) for at, token in enumerate(tokens)]
        assert right == pytest.approx(best, abs=2 * self.case.tolerance)
        assert logprobs_of(samples) == pytest.approx(right, abs=self.case.tolerance)


def logprobs_of(samples: Sequence[SampledToken]) -> list[float]:
    return [sample.logprobs.logprob for sample in samples if sample.logprobs is not None]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(7, 320) for _ in range(length)]


@pytest.fixture(scope="module", params=CASES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    case = CASES[request.param]
    directory = families.make_family(tmp_path_factory.mktemp("vllm"), request.param, 0)
    engine = make_vllm(
        directory,
        NUM_BLOCKS,
        dtype=case.dtype,
        max_model_tokens=2304,
        max_step_tokens=max(512, case.block_tokens),
    )
    return Loaded(case, directory, engine)


def served(serving: Serving, names: dict[str, list[int]]) -> dict[str, list[SampledToken]]:
    for name, prompt in names.items():
        serving.submit(name, prompt, GREEDY)
    serving.run()
    return {name: serving.samples[name] for name in names}


def alone(loaded: Loaded, prompt: list[int]) -> list[SampledToken]:
    return served(loaded.serving(max_step_tokens=loaded.case.block_tokens), {"alone": prompt})[
        "alone"
    ]


def same(loaded: Loaded, one: Sequence[SampledToken], other: Sequence[SampledToken]) -> None:
    assert [sample.token_id for sample in one] == [sample.token_id for sample in other]
    assert logprobs_of(one) == pytest.approx(logprobs_of(other), abs=loaded.case.same)


def test_the_layout_is_ours(loaded: Loaded) -> None:
    layout = loaded.engine.layout
    assert {group.spec.block_tokens for group in layout.groups} == {loaded.case.block_tokens}
    assert {group.blocks_per_state for group in layout.groups} == {1}
    states = [group for group in layout.groups if group.spec.kind == "linear_state"]
    assert len(states) == loaded.case.num_state_groups
    tokens = f"{loaded.case.block_tokens:,}"
    raised = f"of {tokens} tokens instead of 32, as a layer's state lies in one block (padding at"
    assert (raised in loaded.engine.summary) == (loaded.case.block_tokens > 32)


def test_the_plan_is_what_the_worker_does(loaded: Loaded, tmp_path: Path) -> None:
    """`disagg plan --engine vllm`, which reads config.json alone."""
    shutil.copy(loaded.directory / "config.json", tmp_path)
    edit_config(tmp_path, dtype=loaded.case.dtype)
    plan = MemoryReport(tmp_path, "64MiB", 1024, EngineName.VLLM, DeviceName.CPU).plan
    layouts = [plan.layout, loaded.engine.layout]
    groups = [[(str(group.spec), len(group.layers)) for group in one.groups] for one in layouts]
    assert sorted(groups[0]) == sorted(groups[1])
    assert plan.layout.block_bytes == loaded.engine.layout.block_bytes


@pytest.mark.parametrize("max_step_tokens", [37, 512])
def test_packed_chunks(loaded: Loaded, max_step_tokens: int) -> None:
    prompts = {str(length): prompt_of(length) for length in loaded.lengths}
    serving = loaded.serving(max_step_tokens=max_step_tokens)
    for name, samples in served(serving, prompts).items():
        loaded.check(prompts[name], samples)
    mixed = [{len(part.token_ids) for part in step.slices} for step in serving.steps]
    assert any(1 in sizes and len(sizes) > 1 for sizes in mixed)


def test_prefix_hits(loaded: Loaded) -> None:
    """From the blocks at the last common block end: a state is one that was kept there."""
    tokens = loaded.case.block_tokens
    prompt = prompt_of(tokens + 20, seed=1)
    serving = loaded.serving(max_step_tokens=tokens)
    cold = served(serving, {"cold": prompt})["cold"]
    loaded.check(prompt, cold)
    other = [*prompt[:-5], *prompt_of(5, seed=2)]
    hits = served(serving, {"hit": prompt, "other": other})
    assert serving.first_starts(["cold", "hit", "other"]) == [0, tokens, tokens]
    same(loaded, hits["hit"], cold)
    loaded.check(other, hits["other"])
    loaded.engine.pool[1:] = 0  # control: what is cached is what the answer comes from
    spoiled = served(serving, {"spoiled": prompt})["spoiled"]
    with pytest.raises(AssertionError):
        same(loaded, spoiled, cold)


def test_preempted_and_resumed(loaded: Loaded) -> None:
    tokens, groups = loaded.case.block_tokens, len(loaded.engine.layout.groups)
    prompts = {str(n): prompt_of(tokens - 4, seed=n) for n in range(3)}
    expected = {name: alone(loaded, prompt) for name, prompt in prompts.items()}
    num_preemptions = 0
    for num_blocks in range(3 * groups, 5 * groups, 2):
        serving = loaded.serving(num_blocks=1 + num_blocks, max_step_tokens=512)
        for name, samples in served(serving, prompts).items():
            same(loaded, samples, expected[name])
        num_preemptions += serving.core.batcher.num_preemptions
        if num_preemptions:
            break
    assert num_preemptions


def by_hand(loaded: Loaded, prompt: Sequence[int], move_at: int | None) -> list[SampledToken]:
    """Greedy tokens over blocks chosen here.

    When ``move_at`` tokens are sampled, the blocks that are read from there on are copied to
    others, all former ones are zeroed, and a new request goes on.
    """
    engine, layout = loaded.engine, loaded.engine.layout
    sizes = [group.spec.block_tokens for group in layout.groups]
    is_state = [group.spec.kind == "linear_state" for group in layout.groups]
    free = list(range(1, NUM_BLOCKS))
    random.Random(3).shuffle(free)
    tables: list[list[int]] = [[] for _ in sizes]
    tokens, done = list(prompt), 0
    samples: list[SampledToken] = []
    key, is_new = RequestKey("r", 1), True
    ended: tuple[RequestKey, ...] = ()
    while len(samples) < NUM_TOKENS:
        if len(samples) == move_at:
            move_at, ended, key, is_new = None, (key,), RequestKey("moved", 2), True
            former = sorted({block for table in tables for block in table} - {0})
            for table, size, state in zip(tables, sizes, is_state, strict=True):
                first = (done - 1) // size if state else 0
                fresh = [free.pop() for _ in table[first:]]
                engine.pool[fresh] = engine.pool[table[first:]]
                table[:] = [0] * first + fresh
            engine.pool[former] = 0
        count = min(37, len(tokens) - done)
        changes = []
        for table, size, state in zip(tables, sizes, is_state, strict=True):
            before, missing = len(table), -(-(done + count) // size) - len(table)
            table += [0 if state and left else free.pop() for left in range(missing - 1, -1, -1)]
            changes.append(TableChange(0, tuple(table if is_new else table[before:])))
        part = SequenceSlice(
            key,
            tokens[done : done + count],
            done,
            is_new,
            tuple(changes),
            GREEDY if done + count == len(tokens) else None,
            known_token_ids=list(tokens) if is_new else (),
        )
        result = engine.run(Step(done, (part,), ended))
        assert result.error == ""
        done, is_new, ended = done + count, False, ()
        if result.samples[0] is not None:
            samples.append(result.samples[0])
            tokens.append(samples[-1].token_id)
    engine.run(Step(done, (replace(part, key=RequestKey("x", 1)),), (key,)))  # ends it
    return samples


@pytest.mark.parametrize("move_at", [1, 4])
def test_blocks_elsewhere_are_the_same_kv(loaded: Loaded, move_at: int) -> None:
    """A hand-over, or a migration while it decodes: its state may stand at a block's end."""
    for length in loaded.lengths[1:]:
        prompt = prompt_of(length, seed=4)
        stayed = by_hand(loaded, prompt, None)
        loaded.check(prompt, stayed)
        same(loaded, by_hand(loaded, prompt, move_at), stayed)


def test_what_blocks_held_before_does_not_matter(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of other element types share them: its bytes can be NaN to the next one."""
    prompt = prompt_of(45, seed=5)
    loaded.engine.pool.fill_(NAN)
    loaded.check(prompt, alone(loaded, prompt))
    monkeypatch.setattr("disagg.workers.engines.vllm.vllm_engine.fresh_blocks", lambda *_: [])
    loaded.engine.pool.fill_(NAN)
    serving = loaded.serving(max_step_tokens=37)
    serving.submit("control", prompt, GREEDY)
    errors = [serving.step(), *(serving.step() for _ in range(1) if serving.core.sequences)]
    assert "NonFiniteError" in "".join(errors)


def test_control_states_that_do_not_move_are_found(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not loaded.case.num_state_groups:
        pytest.skip("it has no states")
    name = "disagg.workers.engines.vllm.vllm_engine.state_copies"
    monkeypatch.setattr(name, lambda *_: [])
    prompt = prompt_of(loaded.case.block_tokens - 3, seed=6)
    lost = alone(loaded, prompt)
    with pytest.raises(AssertionError):
        loaded.check(prompt, lost)


def test_angles_that_depend_on_the_longest_sequence_part_workers(tmp_path: Path) -> None:
    """Of a long RoPE: by `max_model_tokens` vLLM takes the one factors for all, or the others."""
    make_checkpoint(tmp_path, families.PHI3_LONG)
    from vllm.model_executor.layers import rotary_embedding

    formats = []
    for tokens in (families.PHI3_SHORT_TOKENS, families.PHI3_SHORT_TOKENS + 1):
        rotary_embedding._ROPE_DICT.clear()  # as in a process of its own
        formats.append(make_vllm(tmp_path, 20, max_model_tokens=tokens).page_format)
    assert formats[1] == f"{formats[0]}; long RoPE"


# -- what the CPU cannot ---------------------------------------------------------------------------


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        make()
    return caught.value.message


def test_latents_are_refused_on_the_cpu(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, families.DEEPSEEK_V3)
    assert "compute latent attention (MLA) otherwise" in refusal(lambda: make_vllm(directory, 20))


def test_states_without_a_kernel_are_refused_on_the_cpu(tmp_path: Path) -> None:
    import torch
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import MambaSpec

    from disagg.workers.engines.vllm.devices import refuse_on_cpu

    def refused(kind: object, heads: tuple[int, ...], dtype: torch.dtype) -> str:
        spec = MambaSpec(
            block_size=32, shapes=((3, 64), heads), dtypes=(dtype, dtype), mamba_type=kind
        )
        return refusal(lambda: refuse_on_cpu({"layer": spec}, dtype))

    gdn, bf16 = MambaAttentionBackendEnum.GDN_ATTN, torch.bfloat16
    assert "no CPU kernel for MAMBA1" in refused(MambaAttentionBackendEnum.MAMBA1, (64, 16), bf16)
    assert "in bfloat16 only, not in float32" in refused(gdn, (4, 128, 128), torch.float32)
    assert "the model has 64" in refused(gdn, (4, 64, 64), bf16)
    right = MambaSpec(
        block_size=32, shapes=((3, 64), (4, 128, 128)), dtypes=(bf16, bf16), mamba_type=gdn
    )
    refuse_on_cpu({"layer": right}, bf16)  # control
