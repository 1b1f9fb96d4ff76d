"""The demo's model: a Gemma-3 of 0.1 M parameters, sliding and full layers by turns."""

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GenerationConfig

from demo.task import BOS, EOS, PAD, VOCABULARY, WORD_IDS

WINDOW_TOKENS = 16
CONTEXT_TOKENS = 2048


def build_model(seed: int) -> Gemma3ForCausalLM:
    """Build the untrained model, fp32; the same seed gives the same weights.

    Changes torch's global random state (transformers draws the weights from it).
    """
    torch.manual_seed(seed)
    model = Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            # Not the head size: sharper attention at the start, where one of 200 tokens counts.
            query_pre_attn_scalar=4,
            sliding_window=WINDOW_TOKENS,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                # Stretched (as larger Gemma-3 do, by 8): "the latest" is for the window to know.
                "full_attention": {
                    "rope_type": "linear",
                    "factor": 64.0,
                    "rope_theta": 1_000_000.0,
                },
            },
            layer_types=["sliding_attention", "full_attention"] * 2,
            max_position_embeddings=CONTEXT_TOKENS,
            initializer_range=0.05,
            tie_word_embeddings=True,
            dtype="float32",
            bos_token_id=WORD_IDS[BOS],
            eos_token_id=WORD_IDS[EOS],
            pad_token_id=WORD_IDS[PAD],
        )
    )
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=WORD_IDS[BOS],
        eos_token_id=WORD_IDS[EOS],
        pad_token_id=WORD_IDS[PAD],
        do_sample=False,
        max_new_tokens=32,
    )
    return model
