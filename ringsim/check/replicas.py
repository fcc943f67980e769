"""The check for the lesson on data parallelism: gradients averaged over a stage's replicas."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np

from ringsim.check.examination import (
    Answer,
    CheckResult,
    Examination,
    Wrong,
    examine,
    plain_tensor,
)
from ringsim.traces.events import COLLECTIVE, OP_CODES, OP_NAMES, RECV, SEND
from ringsim.traces.units import count
from ringsim.traces.value import Trace

SIZES = ((2, 2), (1, 3), (3, 2))  # stages and replicas
SHAPES: tuple[tuple[int, ...], ...] = ((3, 4), (4,), (), (2, 1, 5))
NUMBERS = sum(math.prod(shape) for shape in SHAPES)
_BUCKET_HINT = (
    "Join the gradients into one tensor, torch.cat([gradient.flatten() for gradient in "
    "gradients]). Reduce that tensor, and copy each part back to its gradient."
)
_PLACE_HINT = (
    "Write the result into the tensors in the list: gradient.copy_(...) writes into a tensor."
)
_MEAN_HINT = (
    "all_reduce only adds. Divide by the number of replicas, dist.get_world_size(replicas)."
)
_GROUP_HINT = (
    "Pass the group: dist.all_reduce(bucket, group=replicas). Other stages have other parameters."
)
_WAIT_HINT = (
    "An operation with async_op=True returns a handle. Call its wait() before you read the result."
)


def average_gradients(function: Answer, *, seed: int | None = None) -> CheckResult:
    """Checks a function that averages gradients over the replicas of a stage.

    ``function(gradients, replicas)`` receives the gradients of this rank's stage, a list of float32
    tensors, and the process group of the ranks that hold the same stage. It writes the mean over
    the group into each tensor, with a single ``all_reduce`` for all tensors. The check uses
    pipelines with several stages and replicas. The trace must show one such operation, on that
    group, with exactly as many bytes as the gradients.

    Args:
        function: the answer.
        seed: the seed for generating the numbers, or None for a random seed.

    Returns:
        The verdict; its trace shows the last run.

    Example:
        >>> print(average_gradients(lambda gradients, replicas: None, seed=1).reason)
        With 2 stages and 2 replicas, the gradients of rank 0 are unchanged.
    """
    return examine("average_gradients", function, _judge, seed)


def _judge(examination: Examination) -> str:
    for stages, replicas in SIZES:
        about = f"With {count(stages, 'stage')} and {count(replicas, 'replica')}"
        trace = examination.run(
            _average_on_rank, stages * replicas, stages, examination.random.randrange(10**9)
        )
        judge_waits(trace, about)
        _judge_numbers(trace, stages, about)
        judge_reductions(trace, stages, about, 1, 4 * NUMBERS, _BUCKET_HINT)
    sizes = ", ".join(f"{stages} x {replicas}" for stages, replicas in SIZES)
    return (
        f"Right for {sizes} stages and replicas, with one all_reduce of {4 * NUMBERS} bytes on "
        "each rank."
    )


def _average_on_rank(
    function: Answer, stages: int, secret: int
) -> tuple[list[float], list[float] | None]:
    """Returns this rank's gradients before and after, or None if their shapes have changed."""
    import torch  # here, so that a process that only starts ranks does not load it

    from ringsim import comm as dist

    draw = random.Random(f"{secret}/{dist.get_rank()}")
    gradients = [
        torch.tensor([float(draw.randrange(1, 1000)) for _ in range(math.prod(shape))]).view(shape)
        for shape in SHAPES
    ]
    before = torch.cat([gradient.flatten() for gradient in gradients]).tolist()
    function(list(gradients), make_group(stages))
    after: list[float] = []
    for gradient, shape in zip(gradients, SHAPES, strict=True):
        found = plain_tensor(gradient)
        if isinstance(found, str) or found[0] != shape:
            return before, None
        after += found[1]
    return before, after


def make_group(stages: int) -> Any:
    """Creates a group for the replicas of each stage, and returns this rank's group."""
    from ringsim import comm as dist  # as above

    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(stage, size, stages))) for stage in range(stages)]
    return groups[rank % stages]


def judge_waits(trace: Trace, about: str) -> None:
    """Raises ``Wrong`` unless every collective was waited for."""
    for event in trace:
        if event.kind == "collective" and event.status != "ok":
            reason = f"{about}, rank {event.rank} never waits for its {event.op}."
            raise Wrong(reason, _WAIT_HINT)


def _judge_numbers(trace: Trace, stages: int, about: str) -> None:
    """Raises ``Wrong`` unless the gradients are the means; recognises common wrong values."""
    for rank, (_, found) in enumerate(trace.results):
        if found is None:
            reason = f"{about}, the gradients of rank {rank} have changed shape."
            raise Wrong(reason, _PLACE_HINT)
    before, after = map(np.array, zip(*trace.results, strict=True))
    size = len(before)
    replicas = size // stages
    everything = before.sum(axis=0)
    for rank in range(size):
        total = before[rank % stages :: stages].sum(axis=0)
        if np.allclose(after[rank], total / replicas):
            continue
        mixed = [everything / number for number in (1, size, replicas)]
        if np.array_equal(after[rank], before[rank]):
            what, hint = "unchanged", _PLACE_HINT
        elif np.allclose(after[rank], total):
            what, hint = "the sum over the replicas, but must be the mean", _MEAN_HINT
        elif np.allclose(after[rank], total / size):
            what = (
                f"divided by the number of ranks in the world, {size}, instead of the number of "
                "ranks in the group"
            )
            hint = _MEAN_HINT
        elif any(np.allclose(after[rank], like) for like in mixed):
            what, hint = "mixed with the gradients of other stages", _GROUP_HINT
        else:
            what, hint = (
                ("not the mean over the replicas of its stage"),
                f"{_BUCKET_HINT} {_MEAN_HINT}",
            )
        raise Wrong(f"{about}, the gradients of rank {rank} are {what}.", hint)


def judge_reductions(
    trace: Trace, stages: int, about: str, calls: int, size_bytes: int, hint: str
) -> None:
    """Raises ``Wrong`` unless each rank only reduced tensors of this size, on its group."""
    events = trace.events
    for rank in range(trace.world_size):
        called = np.flatnonzero(
            (events.rank == rank)
            & np.isin(events.kind, (SEND, RECV, COLLECTIVE))
            & (events.op != OP_CODES["new_group"])
        )
        names = [OP_NAMES[op] for op in events.op[called]]
        who = f"{about}, rank {rank}"
        if names != ["all_reduce"] * calls:
            called_ones = ", ".join(dict.fromkeys(names)) or "none"
            raise Wrong(
                f"{who} must make {count(calls, 'call')} of all_reduce, but called "
                f"{count(len(names), 'operation')} ({called_ones}).",
                hint,
            )
        due = tuple(range(rank % stages, trace.world_size, stages))
        for index in called:
            members = tuple(events.tables.groups[events.group[index]].ranks)
            if members != due:
                raise Wrong(
                    f"{who} must reduce over ranks {due}, but reduced over {members}.", _GROUP_HINT
                )
            sent = events.size_bytes[index]
            if sent != size_bytes:
                raise Wrong(
                    f"{who} must reduce {size_bytes} bytes in each call, but reduced {sent}.", hint
                )
