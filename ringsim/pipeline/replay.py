"""Runs layers without data once per shape, and replays them after that.

On the virtual clock, a model on device "meta" has no values, and only shapes determine its time. So
only the shape of a layer's output matters, and layers of the same kind return the same shape. One
of these layers runs, and the others return an empty tensor, with gradients for the same parameters.
This makes simulating the 80 layers of a large language model eight times faster, and the trace
stays the same.

Only layers without side effects are replayed. These are modules from torch, transformers and
ringsim that have no hooks and draw no random numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ringsim.comm.torch_private import has_dispatch_modes
from ringsim.pipeline.adapters import Adapter
from ringsim.state import get_state


class LayerReplay:
    """Runs one stage's layers. On a virtual clock, replays the layers without data."""

    def __init__(self) -> None:
        # layers that can replace each other have the same key; None if the layer must run
        self._kinds: dict[nn.Module, Hashable] = {}
        self._outputs: dict[Hashable, tuple[torch.Size, torch.dtype] | None] = {}

    def run(
        self,
        adapter: Adapter,
        model: nn.Module,
        layer: nn.Module,
        hidden: Tensor,
        context: Mapping[str, Any],
    ) -> Tensor:
        """Returns the hidden states after one layer, as ``adapter.run_layer`` does."""
        key = self._find_key(adapter, layer, hidden, context)
        if key is not None and key not in self._outputs:
            self._outputs[key] = _learn_output(adapter, model, layer, hidden, context)
        output = None if key is None else self._outputs[key]
        if output is None:
            return adapter.run_layer(model, layer, hidden, context)
        # torch has no types for apply
        replayed: Tensor = _Replayed.apply(*output, hidden, *layer.parameters())  # type: ignore[no-untyped-call]
        return replayed

    def _find_key(
        self, adapter: Adapter, layer: nn.Module, hidden: Tensor, context: Mapping[str, Any]
    ) -> Hashable:
        """Returns a key that determines the shape of the output, or None if the layer must run."""
        if not hidden.is_meta or get_state().clock is None or torch.is_autocast_enabled("cpu"):
            return None
        if has_dispatch_modes():  # such as that of `ringsim.memory`, which must see all tensors
            return None
        if layer not in self._kinds:
            can_replay = _is_known(adapter) and _does_nothing_else(layer)
            self._kinds[layer] = (repr(layer), layer.training) if can_replay else None
        given = [_describe(value) for value in (hidden, *context.values())]
        if self._kinds[layer] is None or None in given:
            return None
        return (self._kinds[layer], *context, *given)


class _Replayed(torch.autograd.Function):
    """An empty tensor that depends on a layer's input and parameters."""

    @staticmethod
    def forward(ctx: Any, shape: torch.Size, dtype: torch.dtype, *inputs: Tensor) -> Tensor:
        ctx.inputs = [(each.shape, each.dtype) for each in inputs]
        return torch.empty(shape, dtype=dtype, device="meta")

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.inputs, ctx.needs_input_grad[2:], strict=True)
        gradients = [
            torch.empty(shape, dtype=dtype, device="meta") if needs else None
            for (shape, dtype), needs in needed
        ]
        return None, None, *gradients


def _learn_output(
    adapter: Adapter, model: nn.Module, layer: nn.Module, hidden: Tensor, context: Mapping[str, Any]
) -> tuple[torch.Size, torch.dtype] | None:
    """Runs a layer, and returns the shape and dtype of its output.

    If the layer draws random numbers, their state is restored, and the result is None.
    """
    before = torch.get_rng_state()
    with torch.no_grad():
        output = adapter.run_layer(model, layer, hidden, context)
    if torch.equal(before, torch.get_rng_state()):
        return output.shape, output.dtype
    torch.set_rng_state(before)
    return None


def _describe(value: Any) -> Hashable:
    """Returns a key for everything in an argument that affects the shape of an output.

    The key is None if this is unknown.
    """
    if isinstance(value, Tensor):
        return (value.shape, value.dtype) if value.is_meta else None
    if isinstance(value, tuple | list | dict):
        parts = [_describe(each) for each in (value.items() if isinstance(value, dict) else value)]
        return None if None in parts else (type(value), *parts)
    if value is None or isinstance(value, bool | int | float | str):
        return (type(value), value)
    return None


def _does_nothing_else(layer: nn.Module) -> bool:
    """Returns whether a layer consists only of known modules, without hooks or patches."""
    for module in layer.modules():
        own = vars(module)
        if (
            not _is_known(module)
            or "forward" in own
            or any(value for name, value in own.items() if name.endswith("_hooks"))
        ):
            return False
    return True


def _is_known(thing: object) -> bool:
    return type(thing).__module__.partition(".")[0] in ("torch", "transformers", "ringsim")
