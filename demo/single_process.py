"""The same prompts to plain transformers in this one process: the answers to compare with."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo.asking import MAX_TOKENS
from demo.prompts import DemoPrompt
from demo.training import prompt_token_ids


class SingleProcess:
    """Greedy decoding with the checkpoint's own model code and no disagg."""

    def __init__(self, directory: Path) -> None:
        torch.set_num_threads(1)
        # transformers' loaders are typed as what any checkpoint might need; Any is honest here.
        self._tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)

    @torch.no_grad()
    def answer(self, prompt: DemoPrompt) -> str:
        """The whole greedy answer as text, without special tokens."""
        question = prompt_token_ids(self._tokenizer, prompt)
        token_ids = self._model.generate(
            torch.tensor([question]), max_new_tokens=MAX_TOKENS, do_sample=False
        )[0, len(question) :]
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True)).strip()
