"""vLLM's own offline engine: its scheduler, its KV cache manager, its sampler, in one process."""

from collections.abc import Sequence
from typing import Any

from benchmarks.engine.subject import Bounds, Tokens


class VllmAlone:
    """``vllm.LLM``, driven step by step.

    Its engine core runs in this process, which spares it the messages and the waiting of its usual
    two: the figures flatter it a little.
    """

    def __init__(self, bounds: Bounds) -> None:
        import os

        from disagg.workers.engines.vllm.start import set_environment

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        set_environment("cpu", bounds.num_threads)
        import torch
        from vllm import LLM

        self._llm: Any = LLM(
            model=str(bounds.checkpoint),
            dtype="float32",
            skip_tokenizer_init=True,
            block_size=bounds.block_tokens,
            max_model_len=bounds.max_model_tokens,
            max_num_seqs=bounds.max_sequences,
            max_num_batched_tokens=bounds.max_step_tokens,
            kv_cache_memory_bytes=1 << 30,  # as much as the other engines have, and more
            enforce_eager=True,
            disable_hybrid_kv_cache_manager=False,
            distributed_executor_backend="uni",
        )
        torch.set_num_threads(bounds.num_threads)
        self._max_model_tokens = bounds.max_model_tokens
        self._num_made = 0
        self._answers: dict[str, list[int]] = {}

    def prefill(self, prompt: Tokens) -> int:
        """See `Subject`."""
        name = self._submit(prompt, 1, 0.0)
        while not self._answers[name]:
            self._step()
        return self._answers.pop(name)[0]

    def fill(self, prompts: Sequence[Tokens], temperature: float) -> None:
        """See `Subject`."""
        for prompt in prompts[len(self._answers) :]:
            self._submit(prompt, self._max_model_tokens - len(prompt), temperature)
        while not all(self._answers.values()):
            self._step()

    def decode(self, num_steps: int) -> None:
        """See `Subject`."""
        for _ in range(num_steps):
            num_tokens = self._step()
            if num_tokens != len(self._answers):
                raise AssertionError(f"{num_tokens} tokens for {len(self._answers)} sequences")

    def clear(self) -> list[list[int]]:
        """See `Subject`."""
        answers, self._answers = self._answers, {}
        self._llm.llm_engine.abort_request(list(answers))
        return list(answers.values())

    def _submit(self, prompt: Tokens, max_tokens: int, temperature: float) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._num_made += 1
        name = str(self._num_made)
        self._answers[name] = []
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=0.95 if temperature else 1.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
        return name

    def _step(self) -> int:
        num_tokens = 0
        for output in self._llm.llm_engine.step():
            tokens = output.outputs[0].token_ids
            self._answers[output.request_id] += tokens
            num_tokens += len(tokens)
        return num_tokens
