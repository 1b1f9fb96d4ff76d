"""Mixers with a state per request: which there are, and how a packed batch goes through them.

The model's forward stays packed and has no cache; only the mixers see sequences apart.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
import transformers
from torch.nn import functional

from disagg.errors import ConfigError
from disagg.kv.kinds.kind import keeps_states
from disagg.kv.shapes.layout import KVCacheLayout
from disagg.workers.engines.native.state_batch import StateCall
from disagg.workers.engines.native.state_cache import (
    CallStates,
    LayerStates,
    StateShape,
    place_states,
)


def _gated_delta_net(mixer: Any) -> tuple[int, ...]:
    return mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim


def _mamba1(mixer: Any) -> tuple[int, ...]:
    return mixer.intermediate_size, mixer.ssm_state_size


def _mamba2(mixer: Any) -> tuple[int, ...]:
    return mixer.num_heads, mixer.head_dim, mixer.ssm_state_size


MIXERS: Mapping[str, Callable[[Any], tuple[int, ...] | None]] = {
    "BambaMixer": _mamba2,
    "FalconH1Mixer": _mamba2,
    "GraniteMoeHybridMambaLayer": _mamba2,
    "JambaMambaMixer": _mamba1,
    "Lfm2ShortConv": lambda _: None,
    "NemotronHMamba2Mixer": _mamba2,
    "Qwen3NextGatedDeltaNet": _gated_delta_net,
    "Qwen3_5GatedDeltaNet": _gated_delta_net,
}
"""By class: the shape of the recurrent state, None where the convolution has all there is."""

NEEDED = "transformers 5.21 or newer"
"""Where mixers ask for their states; vLLM's environment may have an older release."""
CACHE_ARGUMENTS = ("cache_params", "past_key_values")
_STATE_NAME = re.compile("(conv|recurrent|rnn|ssm|linear)[a-z0-9_]*_(states?|cache)|_indexer$")
_SCAN = "mamba_selective_scan"


class StateMixers:
    """All mixers of a loaded model; from then on they work on the step that is set here.

    Attributes:
        calls: the calls of the step, by group.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        layout: KVCacheLayout,
        pool: torch.Tensor,
        dtype: torch.dtype,
        *,
        first_layer: int,
    ) -> None:
        """Take the place of the forward of every mixer.

        Args:
            model: as transformers loaded it.
            layout: where the states lie in their blocks.
            pool: [num_blocks, block_bytes].
            dtype: of the weights.
            first_layer: layer of the layout that has the state of the model's layer 0.

        Raises:
            ConfigError: a module keeps state that is not in the layout or not known here, or the
                layout has states that no module keeps.
        """
        self.calls: Mapping[int, tuple[StateCall, ...]] = {}
        left = {
            layer for group in layout.groups if keeps_states(group.spec) for layer in group.layers
        }
        for module in model.modules():
            if not keeps_state(module):
                continue
            kind = type(module).__name__
            layer = first_layer + int(getattr(module, "layer_idx", -1))
            if kind not in MIXERS or layer not in left or not _asks_for_state(module):
                # A known name: a release that hands states over in another way.
                older = f" as transformers {transformers.__version__} has it; {NEEDED} is needed"
                raise ConfigError(
                    f"{kind} keeps a state per request that the engine does not know"
                    + (older if kind in MIXERS and not _asks_for_state(module) else ""),
                    param="architectures",
                )
            left.remove(layer)
            states = place_states(layout, pool, layer, _shape_of(module), dtype)
            expected = layout.groups[states.group].spec.page_bytes
            if states.num_bytes != expected:
                raise ConfigError(
                    f"layer {layer}: the state of {kind} takes {states.num_bytes} bytes, "
                    f"by config.json {expected}",
                    param="config.json",
                )
            module.forward = PackedMixer(self, module, states)
        if left:
            raise ConfigError(
                f"config.json: no module keeps the states of layers {sorted(left)}",
                param="architectures",
            )


class PackedMixer:
    """Stands for the forward of one mixer: takes the packed batch apart, call by call."""

    def __init__(self, step: StateMixers, mixer: Any, states: LayerStates) -> None:
        self._step = step
        self._layer_idx = int(mixer.layer_idx)
        self._states = states
        arguments = inspect.signature(mixer.forward).parameters
        (self._cache_argument,) = (name for name in CACHE_ARGUMENTS if name in arguments)
        self._scan: CarriedScan | None = None
        self._forward: Callable[..., torch.Tensor] = mixer.forward
        plain = inspect.unwrap(type(mixer).forward)
        if _SCAN in plain.__code__.co_names:
            self._scan = CarriedScan(plain.__globals__[_SCAN])
            self._forward = _with_scan(plain, self._scan).__get__(mixer)

    def __call__(self, hidden_states: torch.Tensor, **others: object) -> torch.Tensor:
        """Compute [1, T, hidden_size] and leave the new states in the pool.

        Raises:
            ValueError: a cache or a mask, which would mean something else.
        """
        if any(others.get(name) is not None for name in (*CACHE_ARGUMENTS, "attention_mask")):
            raise ValueError("a packed batch has neither a cache nor a mask")
        out = torch.empty_like(hidden_states)
        for call in self._step.calls[self._states.group]:
            num_sequences = len(call.before)
            rows = hidden_states[0].index_select(0, call.rows)
            states = self._read(call)
            if self._scan is not None:
                self._scan.initial = states.recurrent if call.continues else None
            done = self._forward(
                rows.view(num_sequences, -1, rows.shape[-1]), **{self._cache_argument: states}
            )
            out[0].index_copy_(0, call.rows, done.reshape(rows.shape))
            self._states.conv.write(call.after, states.conv)
            if self._states.recurrent is not None and states.recurrent is not None:
                self._states.recurrent.write(call.after, states.recurrent)
        return out

    def _read(self, call: StateCall) -> CallStates:
        conv = self._states.conv.read(call.before).index_fill_(0, call.fresh, 0)
        recurrent = None
        if self._states.recurrent is not None:
            recurrent = self._states.recurrent.read(call.before).index_fill_(0, call.fresh, 0)
        return CallStates(self._layer_idx, conv, recurrent)


class CarriedScan:
    """Mamba-1's scan, from a state: transformers' begins with zeros, whatever the cache holds.

    The scan is linear in its state, so what the initial one adds to every token is added here.

    Attributes:
        initial: [S, channels, state_size] that the next scan begins with, None for zeros.
    """

    def __init__(self, scan: Callable[..., Any]) -> None:
        self._scan = scan
        self.initial: torch.Tensor | None = None

    def __call__(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        *,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``mamba_selective_scan`` with ``return_last_state``."""
        out, last = self._scan(
            hidden_states,
            dt,
            A,
            B,
            C,
            z=z,
            delta_bias=delta_bias,
            delta_softplus=delta_softplus,
            **others,
        )
        if self.initial is None:
            return out, last
        steps = dt.float() if delta_bias is None else dt.float() + delta_bias.float()[:, None]
        if delta_softplus:
            steps = functional.softplus(steps)
        decay = torch.exp(A[None, :, None] * steps.cumsum(2)[..., None])
        carried = decay * self.initial[:, :, None]
        share = torch.einsum("sctn,snt->sct", carried, C.float())
        if z is not None:
            share = share * functional.silu(z)
        return out + share.to(out.dtype), last + carried[:, :, -1]


def keeps_state(module: torch.nn.Module) -> bool:
    """Whether a module's code handles states per request itself, whatever it calls them.

    Attention hands K and V to a function of its own and is not meant here.
    """
    code = inspect.unwrap(type(module).forward).__code__
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return "state" in arguments or any(map(_STATE_NAME.search, (*code.co_names, *arguments)))


def _asks_for_state(mixer: torch.nn.Module) -> bool:
    """Whether it uses the methods that `CallStates` has, and not what they stand for elsewhere."""
    return "get_conv_state" in inspect.unwrap(type(mixer).forward).__code__.co_names


def _shape_of(mixer: Any) -> StateShape:
    conv = mixer.conv if hasattr(mixer, "conv") else mixer.conv1d
    shape = conv.in_channels, conv.kernel_size[0] - 1
    return StateShape(shape, MIXERS[type(mixer).__name__](mixer))


def _with_scan(forward: Callable[..., Any], scan: CarriedScan) -> FunctionType:
    """The same function, in whose module that scan stands instead of its own."""
    assert isinstance(forward, FunctionType)
    names = forward.__globals__ | {_SCAN: scan}
    made = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made
