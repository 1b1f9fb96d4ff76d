"""Linear layers over weights in oneDNN's own form: packed once, and not in every call.

With plain weights a CPU takes up to twice the time of reading them for a product of 4 to 16 rows.
"""

import torch
from torch import nn

_pack = torch.ops.mkldnn._reorder_linear_weight
_linear = torch.ops.mkldnn._linear_pointwise


class PackedLinear(nn.Module):
    """Stands in the place of a ``torch.nn.Linear``, whose weights it takes.

    Attributes:
        bias: as the layer's.
    """

    def __init__(self, linear: nn.Linear) -> None:
        """Pack the weights.

        Raises:
            RuntimeError: oneDNN does not compute this type on this machine.
        """
        super().__init__()
        self.bias = linear.bias
        self._packed: torch.Tensor = _pack(linear.weight)
        self.forward(linear.weight.new_zeros(1, linear.in_features))

    @property
    def weight(self) -> torch.Tensor:
        """The plain weights [outputs, inputs], unpacked for each use: some models read them."""
        return self._packed.to_dense()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows times weights plus bias."""
        product: torch.Tensor = _linear(rows, self._packed, self.bias, "none", [], "")
        return product


def pack_linears(model: nn.Module) -> str:
    """Replace a model's linear layers on the CPU; returns how many, and why not the others.

    A layer's plain weights are dropped before the next one is packed. Those of a head that are the
    embeddings as well stay for these, so such a model has both copies: rows are looked up in plain
    weights alone, and the head, as a rule the largest layer, is read whole in every step, where
    packing saves most. That costs ``vocab_size * hidden_size`` weights. Classes derived from
    ``torch.nn.Linear`` may compute something else, and experts with weights of three dimensions are
    no linear layers: both stay.
    """
    num_packed, reasons = 0, dict[str, str]()
    linears = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    num_linears = len(linears)
    while linears:
        parent, name, child = linears.pop()
        try:
            setattr(parent, name, PackedLinear(child))
            num_packed += 1
        except RuntimeError as error:
            reasons[name] = str(error).partition("\n")[0]
    summary = f"{num_packed} of {num_linears} linear layers packed"
    return summary + "".join(f" ({name}: {reason})" for name, reason in list(reasons.items())[:1])
