"""What a rank really keeps for backward passes, counted in autograd itself: as many activations as the closed form of the schedule says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringsim
from ringsim.pipeline.training import train_step_pipeline
from ringsim.schedules import SCHEDULE_NAMES, make_schedule
from ringsim.schedules.closed_forms import Step, peak_live


class Ledger:
    """How many activations autograd holds in this process."""

    def __init__(self) -> None:
        self.live = self.peak = 0

    def keep(self, tensor: Tensor) -> Any:
        """Called by autograd with each tensor that it saves."""
        return _Kept(tensor, self) if tensor.ndim else tensor  # the weight, a scalar, is no activation

    def show(self, kept: Any) -> Tensor:
        """Called by autograd with what `keep` returned, when a backward pass needs the tensor."""
        return kept.tensor if isinstance(kept, _Kept) else kept


class _Kept:
    """A saved tensor; autograd drops it when it frees the graph."""

    def __init__(self, tensor: Tensor, ledger: Ledger) -> None:
        self.tensor, self._ledger = tensor, ledger
        ledger.live += 1
        ledger.peak = max(ledger.peak, ledger.live)

    def __del__(self) -> None:
        self._ledger.live -= 1


class OneActivation(nn.Module):
    """A layer for which autograd saves one activation: its input."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))
        self._ledger = ledger

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self._ledger.keep, self._ledger.show):
            return x * self.weight


def count_kept(steps: list[tuple[str, int]]) -> list[tuple[int, int, tuple[float | None, ...]]]:
    """Runs steps of one layer a stage; for each the peak, what is left, and the gradients."""
    found = []
    for name, num_microbatches in steps:
        ledger = Ledger()
        schedule = make_schedule(name, ringsim.current_ring().world_size, num_microbatches)
        model = nn.Sequential(*(OneActivation(ledger) for _ in range(schedule.num_stages)))
        microbatches = [torch.full((2,), float(1 + index)) for index in range(num_microbatches)]
        train_step_pipeline(model, microbatches, microbatches, schedule=schedule, loss_fn=lambda y, _: y.sum())
        gradients = tuple(None if parameter.grad is None else parameter.grad.item() for parameter in model.parameters())
        found.append((ledger.peak, ledger.live, gradients))
    return found


def test_no_more_is_kept_than_the_closed_form_says() -> None:
    world_size = 4
    steps = [(name, count) for name in SCHEDULE_NAMES for count in (2 * world_size, 4 * world_size)]
    by_rank = ringsim.trace(count_kept, world_size=world_size, args=(steps,)).results
    for index, (name, count) in enumerate(steps):
        peaks, left, gradients = zip(*(results[index] for results in by_rank), strict=True)
        assert peaks == peak_live(Step(name, world_size, count)), (name, count)
        assert left == (0,) * world_size
        num_stages = len(gradients[0])
        mean = sum(2.0 * (1 + microbatch) for microbatch in range(count)) / count  # of the microbatches' sums
        assert [grad for own in zip(*gradients, strict=True) for grad in own if grad is not None] == pytest.approx(
            [mean * 0.5 ** (num_stages - 1)] * num_stages
        )
