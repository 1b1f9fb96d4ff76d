"""transformers' own ``generate``, held between its steps."""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from benchmarks.engine.subject import Bounds, Tokens


class _Gate(StoppingCriteria):
    """Asked after each token: waits until the next one is wanted."""

    def __init__(self) -> None:
        self.wanted, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.ended = False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        self.done.release()
        self.wanted.acquire()
        return torch.full((len(input_ids),), self.ended)  # type: ignore[return-value]

    def step(self) -> None:
        """Let one more token of each sequence be computed."""
        self.wanted.release()
        self.done.acquire()


class Generate:
    """A batch is one call of ``generate``; other prompts need another one."""

    def __init__(self, bounds: Bounds) -> None:
        torch.set_num_threads(bounds.num_threads)
        model: Any = AutoModelForCausalLM.from_pretrained(
            bounds.checkpoint, local_files_only=True, dtype=torch.float32
        )
        self._model = model.eval()
        self._max_model_tokens = bounds.max_model_tokens
        self._gate, self._thread = _Gate(), threading.Thread()
        self._found: list[list[int]] = []

    def prefill(self, prompt: Tokens) -> int:
        """See `Subject`."""
        found = self._generate([prompt], 0.0, max_new_tokens=1)
        return found[0][0]

    def fill(self, prompts: Sequence[Tokens], temperature: float) -> None:
        """See `Subject`. Prompts must be of one length."""
        self.clear()
        gate = self._gate = _Gate()

        def call() -> None:
            self._found = self._generate(
                prompts,
                temperature,
                max_new_tokens=self._max_model_tokens - len(prompts[0]),
                stopping_criteria=StoppingCriteriaList([gate]),
            )

        self._thread = threading.Thread(target=call, daemon=True)
        self._thread.start()
        gate.done.acquire()

    def decode(self, num_steps: int) -> None:
        """See `Subject`."""
        for _ in range(num_steps):
            self._gate.step()

    def clear(self) -> list[list[int]]:
        """See `Subject`."""
        if self._thread.is_alive():
            self._gate.ended = True
            self._gate.wanted.release()
            self._thread.join()
        found, self._found = self._found, []
        return found

    @torch.inference_mode()
    def _generate(
        self, prompts: Sequence[Tokens], temperature: float, **more: Any
    ) -> list[list[int]]:
        ids = torch.tensor([list(prompt) for prompt in prompts])
        drawn = {"do_sample": True, "temperature": temperature, "top_p": 0.95, "top_k": 0}
        found = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            eos_token_id=None,
            pad_token_id=0,
            **(drawn if temperature else {"do_sample": False}),
            **more,
        )
        return [row[ids.shape[1] :] for row in found.tolist()]
