"""Counts the arithmetic of a stage, from the shapes of its layers and of what it is fed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ringsim.compute_costs import CostTable, Work
from ringsim.pipeline.flops import Flops, attention_flops, linear_flops
from ringsim.pipeline.stage import Stage
from ringsim.schedules.costs import Costs

__all__ = ["count_stage_flops", "flop_costs"]


def count_stage_flops(stage: Stage, x: Tensor, tokens_so_far: int | None = None, *, recomputed: bool = False) -> Flops:
    """Counts a stage, for one microbatch: its linear layers, and the attention that its adapter tells of.

    Args:
        stage: the stage.
        x: its input: token ids, shape (batch, tokens), or hidden states, shape (batch, tokens, hidden) or (batch, features).
        tokens_so_far: tokens of each sequence that attention looks at; None for those of ``x``.
        recomputed: whether the backward pass does the forward pass again, before it finds the gradient of the input.

    Returns:
        The counts. Those of inputs are for stages that need the gradient of their input, which is all of a language model in training.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> count_stage_flops(Stage(model, range(3), is_first=True, is_last=True), torch.zeros(10, 4))
        Flops(forward=960, input_grad=960, weight_grad=960)
    """
    vectors = x.numel() // x.shape[-1] if x.is_floating_point() else x.numel()
    new_tokens = vectors // x.shape[0]
    total = _count(stage, x.shape[0], new_tokens, new_tokens if tokens_so_far is None else tokens_so_far)
    return total._replace(input_grad=total.input_grad + total.forward) if recomputed else total


def flop_costs(stages: Sequence[Stage], table: CostTable, *, sequences: int, tokens: int) -> Costs:
    """Says what the computations of a training step cost, by stage, so that its schedule can be simulated alone.

    The stages may be of device "meta": nothing is computed.

    Args:
        stages: all stages, from `build_stages`.
        table: turns arithmetic into seconds, such as ``ringsim.FlopCosts(flops_per_s=4e14)``.
        sequences: of a microbatch.
        tokens: of a sequence.

    Returns:
        Seconds of each kind of computation, for `ringsim.simulate_schedule` and `evaluate`; messages cost nothing.

    Example:
        >>> import ringsim
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> stages = [Stage(model, range(2), is_first=True, is_last=False), Stage(model, range(2, 3), is_first=False, is_last=True)]
        >>> flop_costs(stages, ringsim.FlopCosts(flops_per_s=1e3), sequences=1, tokens=10).forward
        (0.64, 0.32)
    """
    counts = [_count(stage, sequences, tokens, tokens) for stage in stages]

    def times_s(kind: str) -> tuple[float, ...]:
        return tuple(table.time_s(Work(kind, stage, 0, flops.of(kind))) for stage, flops in enumerate(counts))

    return Costs(times_s("F"), times_s("I"), times_s("W"), times_s("B"))


def _count(stage: Stage, sequences: int, new_tokens: int, tokens_so_far: int) -> Flops:
    total = Flops(0, 0, 0)
    for part in (*stage.first_modules, *stage.layers, *stage.last_modules):
        for in_features, out_features, trained in _linear_layers(part):
            total = total.plus(linear_flops(sequences * new_tokens, in_features, out_features, trained=trained))
    for width in stage.attention_widths():
        total = total.plus(attention_flops(sequences, new_tokens, tokens_so_far, width))
    return total


def _linear_layers(part: nn.Module) -> Sequence[tuple[int, int, bool]]:
    """Lists (in, out, whether it is trained) of the linear layers of a module, GPT-2's ``Conv1D`` included: in x out, whatever its name."""
    found = []
    for module in part.modules():
        if isinstance(module, nn.Linear):
            found.append((module.in_features, module.out_features, module.weight.requires_grad))
        elif type(module).__name__ == "Conv1D" and isinstance(module.weight, Tensor):
            found.append((*module.weight.shape, module.weight.requires_grad))
    return found
