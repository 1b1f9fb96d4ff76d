"""The model that both systems serve: Gemma-3's form, large enough that computing is what counts."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

NUM_RESERVED = 4
"""Token ids below it have a meaning; prompts are drawn from the others."""


def make_checkpoint(
    directory: Path, vocab_size: int, *, hidden_size: int = 512, num_layers: int = 12
) -> None:
    """Write a random checkpoint: five of six layers have a window of 256.

    51 M parameters, if nothing else is said.
    """
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 7 // 2,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 128,
        head_dim=64,
        sliding_window=256,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * (num_layers // 6),
        max_position_embeddings=16_384,
        query_pre_attn_scalar=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = Gemma3ForCausalLM(config)
    model.save_pretrained(directory, safe_serialization=True)
    vocabulary = {f"t{index}": index for index in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token="t1", eos_token="t2", pad_token="t0", unk_token="t3"
    ).save_pretrained(directory)
    (directory / "num_parameters.json").write_text(json.dumps(model.num_parameters()))
