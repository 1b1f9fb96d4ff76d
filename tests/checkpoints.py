"""Tiny random checkpoints on disk, and what plain transformers computes with them.

Everything is a function of the arguments: the same call gives the same bytes of weights.
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from tests.tiny_families import (
    FAMILIES,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    TinyFamily,
)

logging.disable_progress_bar()  # type: ignore[no-untyped-call]

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2

LOUD = ("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "down_proj")
"""Weights drawn larger, so that context outweighs the last token's own embedding."""

UNSCALED = ("gemma3n_text", "gemma4_text")
"""Models whose attention scores are not divided by the root of the head size."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_checkpoint(
    directory: str | Path,
    family: str | TinyFamily,
    *,
    seed: int = 0,
    window: int = 32,
    vocab_size: int = 320,
    num_layers: int | None = None,
    max_position_embeddings: int = 4096,
    **overrides: Any,
) -> Path:
    """Write a checkpoint: config, random weights, byte-level tokenizer with a chat template.

    Special tokens and unprintable bytes have logit 0 and are never the best token: greedy text is
    ASCII and does not end by itself. ``overrides`` are fields of the family's config class.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    tiny = FAMILIES[family] if isinstance(family, str) else family
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": num_layers or tiny.num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": False,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }
    if tiny.windowed:
        common[tiny.window_field] = window
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # for what the model class itself draws
        model = tiny.model(tiny.config(**(common | tiny.fields | overrides)))
    _fill(model, seed)
    model.generation_config.eos_token_id = [EOS_ID, SPECIAL_TOKENS.index("<|end|>")]
    model.save_pretrained(path)
    _tokenizer(vocab_size).save_pretrained(path)
    return path


@torch.inference_mode()
def reference_logits(directory: str | Path, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits [len(token_ids), vocab_size] of the plain, dense, eager forward in float32."""
    model = _reference(str(directory))
    output = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False)
    logits: torch.Tensor = output.logits[0].float()
    return logits


def reference_generate(
    directory: str | Path,
    prompt_token_ids: Sequence[int],
    num_tokens: int,
    adjust: Callable[[torch.Tensor, Sequence[int]], torch.Tensor] | None = None,
) -> tuple[list[int], list[float], float]:
    """Greedy tokens, their logprobs, and the smallest gap between the two best logits.

    ``adjust`` gives the logits that decide, of the model's own and the tokens so far.
    """
    tokens, logprobs, min_gap = list(prompt_token_ids), [], math.inf
    for _ in range(num_tokens):
        logits = reference_logits(directory, tokens)[-1]
        best = (adjust(logits, tokens) if adjust else logits).topk(2)
        min_gap = min(min_gap, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
        logprobs.append(float(logits.log_softmax(-1)[tokens[-1]]))
    return tokens[len(prompt_token_ids) :], logprobs, min_gap


_models: dict[str, Any] = {}


def _reference(directory: str) -> Any:
    if directory not in _models:
        model: Any = AutoModelForCausalLM.from_pretrained(
            directory, local_files_only=True, attn_implementation="eager", dtype=torch.float32
        )
        _models[directory] = model.eval()
    return _models[directory]


@torch.no_grad()
def _fill(model: Any, seed: int) -> None:
    """Random weights under which context matters: greedy text varies, gaps are healthy."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("lm_head.weight"):
            weight.copy_(noise * (4 / math.sqrt(weight.shape[1])))
            weight[_quiet_ids()] = 0
        elif "q_norm" in name or "k_norm" in name:
            # Sharper attention: which token is read matters; and where scores are not divided by
            # the root of the head size, as is learnt in these weights, not so sharp as to be chaos.
            weight.add_((-0.35 if model.config.model_type in UNSCALED else 0.5) + 0.1 * noise)
        elif name.endswith(("dt_bias", "dt_proj.bias")):
            weight.copy_(0.5 * noise - 2)  # small steps: a state remembers many tokens
        elif weight.ndim == 1:
            weight.add_(0.1 * noise)  # norms, biases, sinks stay near what their class set
        elif "embed" in name:
            weight.copy_(noise / (8 if "gemma" in type(model).__name__.lower() else 1))
            if model.config.tie_word_embeddings:  # it is the head as well
                weight[_quiet_ids()] = 0
        else:
            gain = 1.5 if name.rpartition(".")[0].endswith(LOUD) else 1.0
            weight.copy_(noise * (gain / math.sqrt(weight.shape[-1])))


def _byte_tokens() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _quiet_ids() -> list[int]:
    tokens = [*SPECIAL_TOKENS, *_byte_tokens()]
    return [i for i, t in enumerate(tokens) if len(t) > 1 or not (t == "Ġ" or "!" <= t <= "~")]


def _tokenizer(vocab_size: int) -> Any:
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    pairs = [(a, b) for a in letters for b in letters]
    tokens = [*SPECIAL_TOKENS, *_byte_tokens()]
    merges = pairs[: vocab_size - len(tokens)]
    if vocab_size != len(tokens) + len(merges):
        raise ValueError(f"vocab_size must be {len(tokens)} to {len(tokens) + len(pairs)}")
    tokens += [a + b for a, b in merges]
    core = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS_ID)]
    )
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def edit_config(directory: str | Path, **fields: Any) -> None:
    """Change fields of config.json in place; None removes a field."""
    file = Path(directory) / "config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def make_no_file(directory: Path, kind: str, name: str = "config.json") -> Path:
    """Have a file's name lead to what is none; whoever reads it waits, or never ends."""
    path = directory / name
    path.unlink(missing_ok=True)
    if kind == "directory":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        os.mkfifo(directory / "pipe")
        path.symlink_to("pipe")
    return path
