"""The model that all engines run: a Gemma 3 of 63 M parameters with random weights, on disk."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

CHECKPOINT = Path(__file__).resolve().parents[2] / ".cache" / "bench-engine" / "gemma3-63m"
VOCAB_SIZE = 32_000
WINDOW_TOKENS = 256
MAX_MODEL_TOKENS = 8_192


def make_checkpoint(
    path: Path = CHECKPOINT,
    *,
    num_layers: int = 12,
    hidden_size: int = 512,
    vocab_size: int = VOCAB_SIZE,
) -> Path:
    """Write the checkpoint unless it is there; ten of its twelve layers have a window.

    The embeddings are the head's weights too, as in all models of the family.
    """
    if (path / "tokenizer.json").is_file():  # written last
        return path
    path.mkdir(parents=True, exist_ok=True)
    config = Gemma3TextConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=WINDOW_TOKENS,
        layer_types=[
            "full_attention" if layer % 6 == 5 else "sliding_attention"
            for layer in range(num_layers)
        ],
        max_position_embeddings=MAX_MODEL_TOKENS,
        initializer_range=0.05,  # answers depend on the prompt
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        Gemma3ForCausalLM(config).save_pretrained(path)
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3}
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>"))
    )
    tokenizer.save_pretrained(path)
    return path
