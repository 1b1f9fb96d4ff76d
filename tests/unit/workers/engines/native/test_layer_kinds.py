"""Chunks, latents and shared KV under the production scheduler, moved, and with each trap open."""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from disagg.errors import ConfigError
from disagg.kv.kinds.chunked_local import ChunkedLocalSpec
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.mla import MLASpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.workers.engines.native.checkpoint import open_checkpoint
from disagg.workers.engines.native.latent_attention import LatentProjection, expand_latents
from disagg.workers.engines.native.native_engine import NativeEngine
from tests.checkpoints import edit_config, make_checkpoint, reference_logits
from tests.unit.workers.engines.native.runs import Runs, clear_prompt, coordinator, is_as_expected
from tests.unit.workers.engines.native.sequences import Pool, forward_all
from tests.unit.workers.engines.serving import GREEDY

FAMILIES = ("deepseek_v2", "deepseek_v3", "gemma3n", "gemma4", "glm4_moe_lite", "llama4")
SHARING = ("gemma3n", "gemma4")
BLOCK, WINDOW, PLENTY = 8, 32, 300
TIGHT = 36
"""Blocks that do not suffice for four sequences."""
LENGTHS = (9, 33, 75)
"""Beside each other; with ten tokens more the last crosses the ends of chunks 32 and 64."""
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param, window=WINDOW)


@pytest.fixture(scope="module")
def engines(directory: Path) -> Iterator[tuple[NativeEngine, NativeEngine]]:
    """Two of one model, with pools of different sizes."""
    made = [NativeEngine(directory, num_blocks=n, block_tokens=BLOCK) for n in (PLENTY, PLENTY + 9)]
    yield made[0], made[1]
    for engine in made:
        engine.close()


@pytest.mark.parametrize("fault", ["none", "a group stays behind", "another token's"])
def test_a_copy_of_the_blocks_is_a_hand_over(
    directory: Path, engines: tuple[NativeEngine, NativeEngine], fault: str
) -> None:
    """Into other blocks of another engine's pool, at the prompt's end and while decoding."""
    one, other = engines
    prompt, expected = clear_prompt(directory, LENGTHS[2])
    for at in (0, 4):  # sampled tokens before the move
        for engine in engines:
            engine.pool.poison(range(1, engine.pool.num_blocks))
        here = Runs(one, coordinator(one), prompt)
        samples = [here.step(num) for num in (5, 41, 29)] + [here.step(1) for _ in range(at)]
        num_known = here.computed
        assert is_as_expected(samples[2:], expected, 0)
        there = Runs(other, coordinator(other), here.sequence.token_ids)
        reserved = there.kv.reserve_external(there.sequence, num_known)
        assert reserved is not None
        blocks = here.kv.tables.in_window_blocks(here.sequence.key, num_known)
        last_group = len(blocks) - 1
        for group, (mine, theirs) in enumerate(zip(blocks, reserved.lacks, strict=True)):
            assert [index for index, _ in mine] == [index for index, _ in theirs]
            for (_, source), (_, target) in zip(mine, theirs, strict=True):
                if group == last_group and fault == "a group stays behind":
                    continue
                moved = one.pool.tensor[source]
                if group == last_group and fault == "another token's":
                    moved = one.pool.tensor[mine[0][1]]
                other.pool.tensor[target] = moved
        there.kv.commit_external(there.sequence.key)
        there.computed = num_known
        if fault == "a group stays behind":
            there.step(1, is_ok=False)
            continue
        rest = [there.step(1) for _ in range(GREEDY.max_tokens - at - 1)]
        assert is_as_expected(rest, expected, at + 1) is (fault == "none")


def difference(engine: NativeEngine, directory: Path) -> float:
    """Largest error of the logits over chunks of two sequences that are computed together."""
    rng = random.Random(5)
    prompts = [rng.choices(range(7, 320), k=length) for length in (90, 61)]
    pool, largest = Pool(engine, rng), 0.0
    sequences = [pool.start(f"s{n}", prompt) for n, prompt in enumerate(prompts)]
    expected = [reference_logits(directory, prompt) for prompt in prompts]
    for sizes in ((11, 30), (45, 30), (33, 1), (1, 0)):
        taken = [(n, size) for n, size in enumerate(sizes) if size]
        slices = [pool.slice(sequences[n], size) for n, size in taken]
        for (n, size), logits in zip(taken, forward_all(engine, slices), strict=True):
            start = sequences[n].computed
            error = (logits - expected[n][start : start + size]).abs().max()
            largest = max(largest, float(error))
            sequences[n].computed += size
    return largest


def test_temperature_by_packed_rows_is_detected(tmp_path: Path) -> None:
    """Control: Llama-4 as transformers would run it on a packed batch."""
    directory = make_checkpoint(tmp_path, "llama4", window=WINDOW)
    engine = NativeEngine(directory, num_blocks=PLENTY)
    assert difference(engine, directory) < TOLERANCE
    hooked = [m for m in engine._model.modules() if "Llama4TextAttention" in str(type(m))]
    for module in hooked:
        module._forward_pre_hooks.clear()
        module._forward_pre_hooks_with_kwargs.clear()
    assert difference(engine, directory) > 10 * TOLERANCE


def test_a_chunk_taken_for_a_window_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: as many keys, but not those of the chunk."""
    directory = make_checkpoint(tmp_path, "llama4", window=WINDOW)
    engine = NativeEngine(directory, num_blocks=PLENTY)
    monkeypatch.setattr(
        ChunkedLocalSpec, "first_seen", lambda spec, at: max(0, at - spec.chunk_tokens + 1)
    )
    assert difference(engine, directory) > 10 * TOLERANCE


@pytest.mark.parametrize("family", SHARING)
def test_kv_of_another_owner_is_detected(family: str, tmp_path: Path) -> None:
    """Control: the last layers read the first layers of their type instead of the last ones."""
    directory = make_checkpoint(tmp_path, family, window=WINDOW)
    engine = NativeEngine(directory, num_blocks=PLENTY)
    assert engine.checkpoint.kv_owners == {4: 2, 5: 3}
    assert difference(engine, directory) < TOLERANCE
    for layer, wrong in ((4, 0), (5, 1)):
        engine.pool.layers[layer] = replace(engine.pool.layers[wrong], is_shared=True)
    assert difference(engine, directory) > 10 * TOLERANCE


def test_latents_take_the_place_of_keys_and_values(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path, "deepseek_v3"))
    specs = checkpoint.layer_specs(block_tokens=16, dtype_bytes=2)
    assert specs == (MLASpec(16, 1, 24 + 8, 2),) * 3


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_an_absorbed_projection_changes_nothing(family: str, tmp_path: Path) -> None:
    engine = NativeEngine(make_checkpoint(tmp_path, family), num_blocks=2)
    (module, *_) = [m for m in engine._model.modules() if hasattr(m, "latent_projection")]
    projection: LatentProjection = module.latent_projection
    random_of = torch.Generator().manual_seed(3)
    num_heads, size, rank = projection.to_keys.shape
    rotary = module.qk_rope_head_dim
    latents = torch.randn(2, 1, 30, rank + rotary, generator=random_of)
    queries = torch.randn(2, num_heads, 1, size + rotary, generator=random_of)
    keys, values = expand_latents(module, latents)
    attend = partial(functional.scaled_dot_product_attention, scale=0.1)
    expected = attend(queries, keys, values)
    wrong = replace(projection, to_keys=-projection.to_keys)  # control
    for one, is_right in ((projection, True), (wrong, False)):
        found = one.values_of(attend(one.absorb(queries), latents, latents[..., :rank]))
        assert torch.allclose(found, expected, atol=1e-5) is is_right


@pytest.mark.parametrize(("family", "size"), [("gemma3n", 16), ("gemma4", 32)])
def test_only_owners_keep_kv(family: str, size: int, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path, family, window=WINDOW))
    window, full = SlidingWindowSpec(16, 2, 16, 2, 32), FullAttentionSpec(16, 2, size, 2)
    specs = checkpoint.layer_specs(block_tokens=16, dtype_bytes=2)
    assert specs == (window, full, window, full, None, None)


def test_layers_without_rope_see_everything(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path, "llama4", window=WINDOW))
    chunk, full = ChunkedLocalSpec(16, 2, 16, 2, 32), FullAttentionSpec(16, 2, 16, 2)
    specs = checkpoint.layer_specs(block_tokens=16, dtype_bytes=2)
    assert specs == (chunk, chunk, chunk, full)


@pytest.mark.parametrize(
    ("family", "fields", "param"),
    [
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank"),
        ("deepseek_v3", {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ("deepseek_v3", {"attention_chunk_size": 8}, "attention_chunk_size"),
        ("gemma3n", {"num_kv_shared_layers": 5}, "num_kv_shared_layers"),
        ("gemma4", {"use_bidirectional_attention": "vision"}, "use_bidirectional_attention"),
        ("llama4", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ("llama4", {"attention_chunk_size": 0}, "attention_chunk_size"),
        ("llama4", {"kv_lora_rank": 8}, "kv_lora_rank"),
    ],
)
def test_what_a_family_does_not_have_is_refused(
    family: str, fields: dict[str, Any], param: str, tmp_path: Path
) -> None:
    directory = make_checkpoint(tmp_path, family)
    edit_config(directory, **fields)
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(directory)
    # Where transformers' own validation objects first, the message names the field.
    assert caught.value.param == param or param in caught.value.message


def test_weights_of_a_layer_that_predicts_further_tokens_are_refused(tmp_path: Path) -> None:
    """transformers leaves out those of the released size alone; what it would drop is named."""
    directory = make_checkpoint(tmp_path, "deepseek_v3")
    edit_config(directory, num_hidden_layers=2, num_nextn_predict_layers=1)
    with pytest.raises(ConfigError, match=r"unexpected_keys.*layers\.2"):
        NativeEngine(directory, num_blocks=2)
