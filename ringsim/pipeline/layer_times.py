"""How long each part of a model takes here: what a cut by time weighs.

::

    embed | layer 0 | layer 1 | ... | head        each a stage of its own, run forward and backward on a sample
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Final

import torch
from torch import Tensor

from ringsim.pipeline.stage import Stage

__all__ = ["measure_times"]

_REPEATS: Final = 5  # the first one also loads kernels and fills caches; the fastest counts


def measure_times(parts: Sequence[Stage], sample: Tensor) -> list[float]:
    """Measures how long the parts of a model take, one after the other, forward and backward; makes no message.

    Gradients and random numbers are left as they were. The fastest of a few runs counts: noise only adds.

    Args:
        parts: stages that make a model; each gets what the one before gives.
        sample: what enters the first, such as token ids of shape (batch, tokens): as large as a microbatch of the training.

    Returns:
        Seconds for each part.

    Example:
        >>> from ringsim.pipeline import build_stages
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        >>> len(measure_times(build_stages(model, [range(0, 1), range(1, 2)]), torch.ones(4, 2)))
        2
    """
    times_s = []
    with torch.random.fork_rng([sample.device] if sample.is_cuda else []):
        for part in parts:
            runs = [_run(part, sample) for _ in range(_REPEATS)]
            times_s.append(min(duration_s for duration_s, _ in runs))
            sample = runs[-1][1]
    return times_s


def _run(part: Stage, x: Tensor) -> tuple[float, Tensor]:
    """Returns how long one run took, in seconds, and its output."""
    x = x.detach().requires_grad_(x.is_floating_point())
    wanted = [tensor for tensor in (x, *part.parameters()) if tensor.requires_grad]
    start_s = perf_counter()
    with torch.enable_grad():
        y = part(x)
    if y.requires_grad:
        torch.autograd.grad(y, wanted, torch.ones_like(y), allow_unused=True)  # unlike backward(), leaves .grad alone
    if y.is_cuda:
        torch.cuda.synchronize()  # kernels run on after the call: nothing here is recorded, so waiting changes nothing
    return perf_counter() - start_s, y.detach()
