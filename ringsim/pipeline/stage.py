"""Runs one stage's part of a model, forward and backward, for one microbatch.

This module also counts the arithmetic of a stage.

::

    stage 0                       stage 1                     stage 2
    ids -> embed -> layer 0, 1 -> hidden -> layer 2, 3 -----> hidden -> layer 4 -> head -> logits

Every rank has the whole model, and a stage refers to the model's modules. Gradients are therefore
added to the caller's own parameters, and the rest of the model does not change.

This happens at a boundary between two stages::

    stage 0            y  -- sent -->  x            stage 1   x is a leaf: autograd's graph of stage
                                                              1 begins there
    (graph of stage 0) ^               |  (graph of stage 1)
                       grad <- sent -- x.grad                 its gradient is that of y, where the
                                                              graph of stage 0 ends

The tensor that you keep for the backward pass must be *the same tensor that you feed forward, and a
leaf*: a copy of the tensor gets no gradient. A received tensor has no graph, so making it a leaf
cuts nothing.

Random numbers are drawn in the order of the computations, which depends on the schedule. With
``dropout_seed``, each layer gets its own seed for each microbatch. The layer then drops the same
values on any number of ranks, in any schedule, and when an activation is recomputed::

    seed, microbatch 2, layer 5  -->  the masks of layer 5 for microbatch 2, wherever and whenever
                                      they are drawn
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ringsim.compute_costs import CostTable, Work
from ringsim.errors import ArgumentError
from ringsim.pipeline.adapters import Adapter, Announced, adapter_of
from ringsim.pipeline.flops import Flops, attention_flops, linear_flops
from ringsim.pipeline.replay import LayerReplay
from ringsim.schedules.costs import Costs


class Stage(nn.Module):
    """The part of a model that one stage runs. `parameters` returns only this part's parameters.

    Args:
        model: the whole model.
        layers: the numbers of the stage's layers; an empty range is allowed.
        is_first: whether this stage runs the embedding.
        is_last: whether this stage runs the head.
        adapter: the adapter for a kind of model that ringsim does not know.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> stage = Stage(model, range(0, 2), is_first=True, is_last=False)
        >>> stage(torch.zeros(4, 2)).shape, len(list(stage.parameters()))
        (torch.Size([4, 3]), 2)
    """

    def __init__(
        self,
        model: nn.Module,
        layers: range,
        *,
        is_first: bool,
        is_last: bool,
        adapter: Adapter | None = None,
    ) -> None:
        super().__init__()
        self.adapter = adapter or adapter_of(model)
        self.is_first = is_first
        self.is_last = is_last
        self._replay = LayerReplay()
        # for random numbers: the seed of the step, and the microbatch
        self.seed: tuple[int, int] | None = None
        self._before = layers.start  # the number of layers in earlier stages
        # in a tuple, so that the whole model does not become a submodule of the stage
        self._model = (model,)
        self.layers = nn.ModuleList(self.adapter.layers(model)[layers.start : layers.stop])
        first = self.adapter.first_modules(model) if is_first else []
        last = self.adapter.last_modules(model) if is_last else []
        self.first_modules = nn.ModuleList(part for part in first if isinstance(part, nn.Module))
        self.last_modules = nn.ModuleList(part for part in last if isinstance(part, nn.Module))
        self.lone_parameters = nn.ParameterList(
            part for part in (*first, *last) if isinstance(part, nn.Parameter)
        )

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Runs this part of the model, without messages.

        Args:
            x: on the first stage, token ids, shape (batch, tokens); on the other stages, hidden
                states, shape (batch, tokens, hidden).
            attention_mask: 1 for a token and 0 for padding, shape (batch, tokens so far), or None
                if there is no padding and there are no earlier tokens.
            position_ids: the position of each token in its sequence, shape (batch or 1, tokens), or
                None for the model's own positions.
            cache: this stage's cache of keys and values, from ``stage.adapter.cache(model)``. A
                cache requires ``attention_mask``.

        Returns:
            The hidden states or, on the last stage, the logits, shape (batch, tokens, vocabulary).
        """
        (model,) = self._model
        announced = Announced(attention_mask, position_ids, cache)
        hidden = x
        if self.is_first:
            with self._seeded(0, x):
                hidden = self.adapter.embed(model, x, announced)
        if self.layers:
            context = self.adapter.context(model, hidden, announced)
            for place, layer in enumerate(self.layers, start=self._before + 1):
                with self._seeded(place, hidden):
                    hidden = self._replay.run(self.adapter, model, layer, hidden, context)
        if self.is_last:
            with self._seeded(len(self.adapter.layers(model)) + 1, hidden):
                hidden = self.adapter.head(model, hidden)
        return hidden

    @contextmanager
    def _seeded(self, place: int, where: Tensor) -> Iterator[None]:
        """Seeds the random numbers for part of the model, and restores the state afterwards."""
        if self.seed is None:
            yield
            return
        with keep_random_numbers(where):
            torch.manual_seed(zlib.crc32("{} {} {}".format(*self.seed, place).encode()))
            yield

    def attention_widths(self) -> list[int]:
        """Returns the width of each layer's attention, or 0 for a layer without attention.

        See `Adapter.attention_width`.
        """
        (model,) = self._model
        return [self.adapter.attention_width(model, layer) for layer in self.layers]


def keep_random_numbers(where: Tensor) -> AbstractContextManager[None]:
    """Restores the random state of the CPU and of a tensor's GPU after a block."""
    return torch.random.fork_rng([where.device] if where.is_cuda else [])


def build_stages(
    model: nn.Module, partition: Sequence[range], *, adapter: Adapter | None = None
) -> list[Stage]:
    """Returns all stages of a model.

    Args:
        model: the whole model.
        partition: the layers of each stage, as returned by `partition_model`.
        adapter: the adapter for a kind of model that ringsim does not know.

    Returns:
        The stages. Calling them one after another returns the model's output.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> x = torch.ones(4, 2)
        >>> first, last = build_stages(model, [range(0, 2), range(2, 3)])
        >>> bool((last(first(x)) == model(x)).all())
        True
    """
    last = len(partition) - 1
    return [
        Stage(model, layers, is_first=index == 0, is_last=index == last, adapter=adapter)
        for index, layers in enumerate(partition)
    ]


def check_owned(model: nn.Module, stages: Sequence[Stage]) -> None:
    """Raises an error if one of the model's trained parameters belongs to no stage.

    The gradient of such a parameter would be lost, or would differ between ranks.
    """
    owned = {parameter for stage in stages for parameter in stage.parameters()}
    lost = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter not in owned
    ]
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise ArgumentError(
            f"no stage has the trained parameter {lost[0]!r}{more} of {type(model).__name__}. "
            "Return the parameter, or its module, from the adapter's first_modules or "
            "last_modules. If the model does not use the parameter, set requires_grad to False."
        )


def tied_parameters(
    model: nn.Module, partition: Sequence[range], *, adapter: Adapter | None = None
) -> dict[str, list[int]]:
    """Finds the parameters that more than one stage uses.

    An example is a weight that the embedding and the head share. The gradient of such a parameter
    is the sum over its stages, so their ranks must add up the gradients.

    Args:
        model: the whole model.
        partition: the layers of each stage, as returned by `partition_model`.
        adapter: the adapter for a kind of model that ringsim does not know.

    Returns:
        A dict that maps parameter names (as in ``model.named_parameters()``) to the stages that use
        the parameter.

    Example:
        >>> shared = nn.Linear(2, 2, bias=False)
        >>> tied_parameters(nn.Sequential(shared, nn.ReLU(), shared), [range(0, 1), range(1, 3)])
        {'0.weight': [0, 1]}
    """
    stages = build_stages(model, partition, adapter=adapter)
    holders = find_holders(stages, range(len(stages)))
    return {
        name: sorted(holders[parameter])
        for name, parameter in model.named_parameters()
        if len(holders.get(parameter, ())) > 1
    }


def find_holders(
    stages: Sequence[Stage],
    numbers: Iterable[int],
    list_parts: Callable[[Stage], Iterable[Any]] = Stage.parameters,
) -> dict[Any, set[int]]:
    """Maps each part of the stages to the numbers of the stages that hold the part.

    ``numbers`` lists one number per stage, such as the stage's own number or the number of its
    rank.
    """
    holders: dict[Any, set[int]] = {}
    for stage, number in zip(stages, numbers, strict=True):
        for part in list_parts(stage):
            holders.setdefault(part, set()).add(number)
    return holders


def forward_stage(stage: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Runs a stage on a received tensor ``x`` and prepares ``x`` to receive a gradient.

    Keep ``x`` and the result for `backward_stage`. This function sends no messages.

    Args:
        stage: a module, or any function of one tensor.
        x: the input, which must be a leaf: hidden states, shape (batch, seq, hidden), or token ids,
            shape (batch, seq), which have no gradient. If ``x`` is a floating-point tensor, its
            ``requires_grad`` is set.

    Returns:
        The output ``y``, which is hidden states or logits.

    Raises:
        ArgumentError: ``x`` is not a leaf of autograd's graph.

    Example:
        >>> x = torch.ones(1, 2)
        >>> y = forward_stage(lambda x: 3 * x, x)
        >>> backward_stage(x, y, torch.ones(1, 2))
        tensor([[3., 3.]])
    """
    if not x.is_leaf:
        raise ArgumentError(
            f"x must be a leaf of autograd's graph, got the result of {type(x.grad_fn).__name__}. "
            "Pass the received tensor, or x.detach() if a different stage on this rank computed x."
        )
    if x.is_floating_point() and torch.is_grad_enabled():
        # torch has no types for apply
        entered: Tensor = _Entrance.apply(x.requires_grad_())  # type: ignore[no-untyped-call]
        return stage(entered)
    return stage(x)


class _Entrance(torch.autograd.Function):
    """Turns a leaf into a tensor that holds the same data and that a layer may change in place.

    Torch forbids changing a leaf in place.
    """

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return grad


def backward_stage(x: Tensor, y: Tensor, grad: Tensor | None) -> Tensor | None:
    """Runs the backward pass of a stage.

    This function accumulates gradients into the stage's parameters and returns the gradient of
    ``x``. It sends no messages and frees the graph of ``y``.

    Args:
        x: the input of `forward_stage`.
        y: the output of `forward_stage`.
        grad: the gradient of ``y``, of the same shape, from the next stage, or None on the last
            stage, where ``y`` is the loss.

    Returns:
        The gradient of ``x`` for the previous stage, or None if ``x`` has no gradient (token ids)
        or the stage needs no gradients.

    Example:
        >>> weight = torch.tensor(2.0, requires_grad=True)
        >>> x = torch.tensor(5.0)
        >>> y = forward_stage(lambda x: weight * x, x)
        >>> backward_stage(x, y, grad=None), weight.grad
        (tensor(2.), tensor(5.))
    """
    if y.requires_grad:
        torch.autograd.backward(y, grad)
    return x.grad


def backward_input(x: Tensor, y: Tensor, grad: Tensor | None) -> Tensor | None:
    """Runs the first half of a backward pass.

    This function computes the gradient of ``x``, which the previous stage waits for, but no
    gradients of parameters. Call `backward_weight` later. Until then, the graph and its activations
    stay in memory. On the first stage, where ``x`` needs no gradient, this half does nothing.

    Together, the two halves cost more than `backward_stage`: autograd does not keep the gradients
    between the layers, so the second half computes them again. Schedules with split backward passes
    save waiting, not work.

    Args:
        x: the input of `forward_stage`.
        y: the output of `forward_stage`.
        grad: the gradient of ``y`` from the next stage, or None on the last stage.

    Returns:
        The gradient of ``x``, or None if ``x`` has no gradient.

    Example:
        >>> weight = torch.tensor(2.0, requires_grad=True)
        >>> x = torch.tensor(5.0)
        >>> y = forward_stage(lambda x: weight * x, x)
        >>> backward_input(x, y, grad=None), weight.grad
        (tensor(2.), None)
        >>> backward_weight(y, grad=None, parameters=[weight])
        >>> weight.grad
        tensor(5.)
    """
    if x.requires_grad and y.requires_grad:
        torch.autograd.backward(y, grad, inputs=[x], retain_graph=True)
    return x.grad


def backward_weight(
    y: Tensor, grad: Tensor | None, parameters: Iterable[nn.Parameter | Tensor]
) -> None:
    """Runs the second half of a backward pass.

    This function accumulates gradients into the stage's parameters and frees the graph.

    Args:
        y: the output of `forward_stage`.
        grad: the gradient of ``y``, as passed to `backward_input`.
        parameters: the stage's parameters; frozen parameters receive no gradient.

    Example:
        See `backward_input`.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if trained and y.requires_grad:
        torch.autograd.backward(y, grad, inputs=trained)


def count_stage_flops(
    stage: Stage, x: Tensor, tokens_so_far: int | None = None, *, recomputed: bool = False
) -> Flops:
    """Counts a stage's arithmetic for one microbatch.

    The count covers the linear layers, and the attention that the adapter describes.

    Args:
        stage: the stage; its input is assumed to need a gradient, as in the training of a language
            model.
        x: the input: token ids, shape (batch, tokens), or hidden states, shape (batch, tokens,
            hidden) or (batch, features).
        tokens_so_far: the number of tokens in each sequence that attention uses, or None for the
            number of tokens in ``x``.
        recomputed: whether the backward pass first repeats the forward pass.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> count_stage_flops(
        ...     Stage(model, range(3), is_first=True, is_last=True), torch.zeros(10, 4)
        ... )
        Flops(forward=960, input_grad=960, weight_grad=960)
    """
    vectors = x.numel() // x.shape[-1] if x.is_floating_point() else x.numel()
    new_tokens = vectors // x.shape[0]
    total = _count(
        stage, x.shape[0], new_tokens, new_tokens if tokens_so_far is None else tokens_so_far
    )
    return total._replace(input_grad=total.input_grad + total.forward) if recomputed else total


def flop_costs(stages: Sequence[Stage], table: CostTable, *, sequences: int, tokens: int) -> Costs:
    """Returns the costs of a training step's computations on each stage.

    With these costs, you can simulate a schedule of the step without ranks. The stages may be on
    device "meta", because nothing is computed.

    Args:
        stages: all stages, from `build_stages`.
        table: a conversion from arithmetic to seconds, such as
            ``ringsim.FlopCosts(flops_per_s=4e14)``.
        sequences: the number of sequences in a microbatch.
        tokens: the number of tokens in a sequence.

    Returns:
        The time in seconds of each kind of computation, for use in `ringsim.simulate_schedule` and
        `evaluate`. Messages cost nothing.

    Example:
        >>> import ringsim
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> stages = [
        ...     Stage(model, range(2), is_first=True, is_last=False),
        ...     Stage(model, range(2, 3), is_first=False, is_last=True),
        ... ]
        >>> flop_costs(stages, ringsim.FlopCosts(flops_per_s=1e3), sequences=1, tokens=10).forward
        (0.64, 0.32)
    """
    counts = [_count(stage, sequences, tokens, tokens) for stage in stages]

    def times_s(kind: str) -> tuple[float, ...]:
        return tuple(
            table.time_s(Work(kind, stage, 0, flops.of(kind))) for stage, flops in enumerate(counts)
        )

    return Costs(times_s("F"), times_s("I"), times_s("W"), times_s("B"))


def _count(stage: Stage, sequences: int, new_tokens: int, tokens_so_far: int) -> Flops:
    total = Flops(0, 0, 0)
    for part in (*stage.first_modules, *stage.layers, *stage.last_modules):
        for in_features, out_features, trained in _linear_layers(part):
            total = total.plus(
                linear_flops(sequences * new_tokens, in_features, out_features, trained=trained)
            )
    for width in stage.attention_widths():
        total = total.plus(attention_flops(sequences, new_tokens, tokens_so_far, width))
    return total


def _linear_layers(part: nn.Module) -> Sequence[tuple[int, int, bool]]:
    """Returns (in_features, out_features, trained) for each linear layer in a module.

    GPT-2's ``Conv1D`` also counts as a linear layer.
    """
    found = []
    for module in part.modules():
        if isinstance(module, nn.Linear):
            found.append((module.in_features, module.out_features, module.weight.requires_grad))
        elif type(module).__name__ == "Conv1D" and isinstance(module.weight, Tensor):
            found.append((*module.weight.shape, module.weight.requires_grad))
    return found
