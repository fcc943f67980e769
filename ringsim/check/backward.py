"""The check for the lesson on gradients: a training step split across stages."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ringsim.check.examination import (
    Answer,
    CheckResult,
    Examination,
    Wrong,
    examine,
    find_wrong,
    make_task,
)
from ringsim.traces.units import count
from ringsim.traces.value import Trace

if TYPE_CHECKING:
    from ringsim.pipeline.reports import GradientRow

_RAISED_HINT = (
    "If a value is None here, it is probably x.grad: call x.requires_grad_() before the forward "
    "pass, and pass that same x to the stage, not a copy. The first stage receives no activation "
    "and sends no gradient; the last stage sends no activation and receives no gradient."
)
# a reason and a hint for each verdict on a gradient
_COMPLAINTS = {
    "missing": (
        "Stage {who} has no gradient for its parameter {row.parameter} after a step with "
        "{batches}.",
        "A stage gets its gradient from the next stage: call recv_gradient, and then "
        "y.backward(grad) with the y that you sent. Keep x and y of every microbatch until then.",
    ),
    "scaled": (
        "The gradients of stage {who} are {row.scale:.4g} times as large as in a single process "
        "after a step with {batches}.",
        "The loss of a step is the mean over microbatches: divide each loss by the number of "
        "microbatches before you call backward().",
    ),
    "different": (
        "Stage {who} and a single process have different gradients for {row.parameter} after a "
        "step with {batches}: the difference is {row.difference:.2g}.",
        "Check which tensors you combine: the gradient of microbatch i goes with the x and the y "
        "of microbatch i. Each parameter accumulates the gradients of all microbatches, so do not "
        "reset the gradients in between.",
    ),
    "zeros": (
        "Stage {who} has a gradient of zeros for its parameter {row.parameter} after a step with "
        "{batches}.",
        "A stage received a gradient of zeros. Zeros are sent if x.grad is None: call "
        "x.requires_grad_() before the forward pass, and pass that same x to the stage, not a "
        "copy.",
    ),
    "unexpected": (
        "Stage {who} has a gradient for {row.parameter}, which belongs to another stage.",
        "This rank has a gradient for a layer that belongs to another stage. Call only stage(x), "
        "and no other part of the model.",
    ),
}
_SMALL_HINT = (
    "The gradients are too small: do you divide the loss twice, or lose the gradients of some "
    "microbatches?"
)


def gradients(function: Answer, *, seed: int | None = None) -> CheckResult:
    """Checks a training step split across stages.

    After the step, every parameter must have the gradient that a single process would compute. The
    check calls ``function(stage, inputs, targets, loss_fn)`` on every rank. ``stage`` is the rank's
    part of a model. ``inputs`` and ``targets`` are lists with one tensor per microbatch: the first
    stage uses the inputs (token ids), and the last stage uses the targets. ``loss_fn(logits,
    target)`` is the mean loss of a microbatch, and the step's loss is the mean over microbatches.
    The check uses 1, 2 and 3 ranks, with one microbatch and with several.

    Args:
        function: the answer.
        seed: the seed for generating the sizes, weights and data, or None for a random seed.

    Returns:
        The verdict; its trace shows the messages.

    Example:
        >>> print(gradients(lambda stage, inputs, targets, loss_fn: None, seed=1).reason)
        Stage 0 of 3 has no gradient for its parameter 0.weight after a step with 4 microbatches.
    """
    return examine("gradients", function, _judge, seed)


def _judge(examination: Examination) -> str:
    draw = examination.random
    traces = []
    runs = {3: [4], 2: [1, draw.choice([2, 3])], 1: [draw.choice([2, 5])]}
    for world_size, steps in runs.items():
        trace = examination.run(
            _steps_on_rank, world_size, draw.randrange(10**9), steps, hint=_RAISED_HINT
        )
        traces.append(trace)
        for index, num_microbatches in enumerate(steps):
            _judge_step(trace, index, num_microbatches)
    examination.judge_content(
        lambda blank: _judge_step(blank, 0, 2), _steps_on_rank, draw.randrange(10**9), [2]
    )
    examination.trace = traces[0]
    return (
        "Every parameter has the same gradient as in a single process, on 1, 2 and 3 ranks, with "
        "one microbatch and with several."
    )


def _steps_on_rank(function: Answer, secret: int, steps: Sequence[int]) -> list[GradientRow | None]:
    """Runs several steps, each with its own model; returns each step's worst gradient or None."""
    from ringsim.pipeline.partition import partition_model
    from ringsim.pipeline.stage import build_stages
    from ringsim.pipeline.training import cross_entropy
    from ringsim.ring import current_ring

    ring = current_ring()
    found = []
    for num_microbatches in steps:
        task = make_task(secret, num_microbatches)
        before = copy.deepcopy(task)  # the answer may change weights and data
        named = dict(task.model.named_parameters())
        stage = build_stages(task.model, partition_model(task.model, ring.world_size))[ring.rank]
        mine = list(stage.parameters())
        function(stage, list(task.inputs), list(task.targets), cross_entropy)
        found.append(find_wrong(before, named, mine))
    return found


def _judge_step(trace: Trace, index: int, num_microbatches: int) -> None:
    """Raises ``Wrong`` for the first stage with a wrong gradient.

    Missing gradients come first, because they often cause the others.
    """
    rows = [result[index] for result in trace.results]
    wrong = [rank for rank, row in enumerate(rows) if row is not None]
    if not wrong:
        return
    rank = min(wrong, key=lambda rank: (rows[rank].verdict != "missing", rank))
    row = rows[rank]
    reason, hint = _COMPLAINTS[row.verdict]
    if row.verdict == "scaled" and row.scale < 1:
        hint = _SMALL_HINT
    who, batches = f"{rank} of {trace.world_size}", count(num_microbatches, "microbatch")
    raise Wrong(reason.format(who=who, row=row, batches=batches), hint)
