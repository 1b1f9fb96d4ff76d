"""A tokenizer and a chat template as a router loads them: byte-level BPE, 32,000 entries."""

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config

VOCAB_SIZE = 32_000
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_checkpoint(path: Path) -> Path:
    """Write config and tokenizer; there are no weights, as routers need none."""
    path.mkdir(parents=True)
    chance = random.Random(1)
    letters = "etaoinshrdlucmfwypvbgk"
    words = ["".join(chance.choices(letters, k=chance.randint(2, 9))) for _ in range(40_000)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((" " + word for word in words), trainer)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token="<|im_end|>", additional_special_tokens=special
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=131_072,
    ).to_dict()
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    return path
