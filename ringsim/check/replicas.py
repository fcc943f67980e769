"""The check for the lesson on data parallelism: gradients averaged over a stage's replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringsim.check.examination import (
    Answer,
    CheckResult,
    Examination,
    Wrong,
    examine,
)
from ringsim.traces.collectives import COLLECTIVES, MESSAGES
from ringsim.traces.units import count
from ringsim.traces.value import Trace

SIZES = ((2, 2), (1, 3), (3, 2))  # stages and replicas
SHAPES: tuple[tuple[int, ...], ...] = ((3, 4), (4,), (), (2, 1, 5))
NUMBERS = sum(math.prod(shape) for shape in SHAPES)
# the simplest name of each operation
_OPERATIONS = {name: name for name in MESSAGES} | {
    name: each.family for name, each in COLLECTIVES.items()
}
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
        _judge_numbers(trace, stages, about)
        due = [f"all_reduce of {4 * NUMBERS} bytes"]
        judge_calls(trace, about, due, f"{_BUCKET_HINT} {_GROUP_HINT}", stages=stages)
    return (
        f"Right with 2 and 3 replicas of a stage, with one all_reduce of {4 * NUMBERS} bytes on "
        "each rank."
    )


def _average_on_rank(
    function: Answer, stages: int, secret: int
) -> tuple[list[float], list[float] | None]:
    """Returns this rank's gradients before and after, or None if their shapes have changed."""
    import torch  # here, so that a process that only starts ranks does not load it
    from torch.nn.utils import parameters_to_vector

    from ringsim import comm as dist

    torch.manual_seed(secret + dist.get_rank())
    gradients = [torch.randint(1, 1000, shape).float() for shape in SHAPES]
    before = parameters_to_vector(gradients).tolist()
    function(list(gradients), make_group(stages))
    if tuple(gradient.shape for gradient in gradients) != SHAPES:
        return before, None
    return before, parameters_to_vector(gradients).tolist()


def make_group(stages: int) -> Any:
    """Creates a group for the replicas of each stage, and returns this rank's group."""
    from ringsim import comm as dist  # as above

    size = dist.get_world_size()
    groups = [list(range(stage, size, stages)) for stage in range(stages)]
    return dist.new_subgroups_by_enumeration(groups)[0]


def _judge_numbers(trace: Trace, stages: int, about: str) -> None:
    """Raises ``Wrong`` unless the gradients are the means; recognises common wrong values."""
    starts, after = zip(*trace.results, strict=True)
    if None in after:
        reason = f"{about}, the gradients of rank {after.index(None)} have changed shape."
        raise Wrong(reason, _PLACE_HINT)
    before = np.array(starts)
    size = len(before)
    replicas = size // stages
    everything = before.sum(axis=0)
    for rank in range(size):
        total = before[rank % stages :: stages].sum(axis=0)
        if np.allclose(after[rank], total / replicas):
            continue
        size_text = (
            f"divided by the number of ranks in the world, {size}, instead of the number of ranks "
            "in the group"
        )
        mixed = "mixed with the gradients of other stages", _GROUP_HINT
        known = [
            (before[rank], "unchanged", _PLACE_HINT),
            (total, "the sum over the replicas, but must be the mean", _MEAN_HINT),
            (total / size, size_text, _MEAN_HINT),
            *((everything / number, *mixed) for number in (1, size, replicas)),
        ]
        unknown = "not the mean over the replicas of its stage", f"{_BUCKET_HINT} {_MEAN_HINT}"
        causes = [cause for numbers, *cause in known if np.allclose(after[rank], numbers)]
        what, hint = [*causes, unknown][0]
        raise Wrong(f"{about}, the gradients of rank {rank} are {what}.", hint)


def judge_calls(
    trace: Trace, about: str, due: Sequence[str], hint: str, *, stages: int = 1
) -> None:
    """Raises ``Wrong`` unless each rank made the calls that are due, in any order, on its group.

    A call is in words, such as "all_reduce of 8 bytes".
    """
    groups = {group.name: group.ranks for group in trace.events.tables.groups}
    for rank in range(trace.world_size):
        members = tuple(range(rank % stages, trace.world_size, stages))
        calls = [each for each in trace if each.rank == rank and each.op in _OPERATIONS]
        others = {groups.get(call.group or "") for call in calls} - {members}
        found = [f"{_OPERATIONS[call.op]} of {call.size_bytes} bytes" for call in calls]
        if others:
            must = f"be over ranks {members}, but are over {others.pop()}"
        elif sorted(found) != sorted(due):
            must = f"be {', '.join(due)}, but are {', '.join(found) or 'none'}"
        else:
            continue
        raise Wrong(f"{about}, rank {rank}: its calls must {must}.", hint)
