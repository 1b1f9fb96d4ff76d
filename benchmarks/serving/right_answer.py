"""A request whose tokens plain transformers gives: asked before anything is measured."""

import gc
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM

from benchmarks.servers.program import START_S
from benchmarks.servers.vllm import MODEL
from benchmarks.serving.checkpoint import NUM_RESERVED
from benchmarks.serving.systems import MAX_STEP_TOKENS, System

NUM_CHECKED_TOKENS = 16


@dataclass(frozen=True, slots=True)
class RightAnswer:
    """A prompt longer than a step and than the model's window, and its greedy answer."""

    prompt: list[int]
    text: str


def right_answer(checkpoint: Path, vocab_size: int) -> RightAnswer:
    """Let plain transformers answer, in float32."""
    rng = random.Random(0)
    prompt = [rng.randrange(NUM_RESERVED, vocab_size) for _ in range(MAX_STEP_TOKENS + 100)]
    model: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint, local_files_only=True, dtype=torch.float32
    )
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=NUM_CHECKED_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
    del model
    gc.collect()
    return RightAnswer(prompt, " ".join(f"t{token}" for token in ids[0, len(prompt) :].tolist()))


def check(system: System, right: RightAnswer) -> None:
    """Ask a system; ends the program if it answers anything else."""
    body = {
        "model": MODEL,
        "prompt": right.prompt,
        "max_tokens": NUM_CHECKED_TOKENS,
        "ignore_eos": True,
        "temperature": 0.0,
    }
    answer = httpx.post(f"{system.url}/v1/completions", json=body, timeout=START_S)
    answer.raise_for_status()
    text = answer.json()["choices"][0]["text"]
    if text.split() != right.text.split():
        sys.exit(f"{system.name} answers {text!r} where plain transformers answers {right.text!r}")
