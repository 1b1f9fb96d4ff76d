"""Logits of any tokens of a pass, not only of those that are sampled."""

from typing import Any

import torch


class RowLogits:
    """What the model's own code behind its layers makes of rows of the pass that was run last.

    A vocabulary of logits for every token of a prompt would be more memory than all else of the
    step, so they are made a few rows at a time.

    Args:
        model: a causal model of transformers; its layers are in ``model``.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._layers = model, model.model
        self._output: Any = None
        self._layers.register_forward_hook(self._keep)

    def of(self, input_ids: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """Logits [rows, vocab_size] behind the packed rows ``first .. end``.

        Args:
            input_ids: [1, T], of the pass.
            first: the first row.
            end: behind the last one.
        """
        kept = self._output
        shown = type(kept)(last_hidden_state=kept.last_hidden_state[:, first:end])
        self._layers.forward = lambda *_, **__: shown  # in place of the layers, for this call
        try:
            output = self._model(
                input_ids=input_ids[:, first:end], use_cache=False, logits_to_keep=0
            )
        finally:
            del self._layers.forward
            self._output = kept
        logits: torch.Tensor = output.logits[0]
        return logits

    @property
    def hidden_states(self) -> torch.Tensor:
        """Those behind the layers, of every token of the pass: [T, hidden size]."""
        states: torch.Tensor = self._output.last_hidden_state[0]
        return states

    def close(self) -> None:
        """Drop the model."""
        self._model = self._layers = self._output = None

    def forget(self) -> None:
        """The step is over: let its hidden states go."""
        self._output = None

    def _keep(self, _module: object, _args: object, output: Any) -> None:
        self._output = output
