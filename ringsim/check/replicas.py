"""The lesson on data parallelism.

The mean of gradients over the replicas of a stage, in one bucket.
"""

from __future__ import annotations

import math
import random
from typing import Final

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

__all__ = ["average_gradients"]

SIZES: Final = ((2, 2), (1, 3), (3, 2))  # stages and replicas
SHAPES: Final[tuple[tuple[int, ...], ...]] = ((3, 4), (4,), (), (2, 1, 5))
NUMBERS: Final = sum(math.prod(shape) for shape in SHAPES)
_BUCKET_HINT: Final = (
    "Join them in one tensor, torch.cat([gradient.flatten() for gradient in gradients]). Reduce "
    "that, and copy each part back to where it came from."
)
_PLACE_HINT: Final = (
    "What counts is what stands in the tensors of the list afterwards: "
    "gradient.copy_(...) writes into one."
)
_MEAN_HINT: Final = (
    "all_reduce adds up. Divide by the number of replicas, dist.get_world_size(replicas)."
)
_GROUP_HINT: Final = (
    "Pass the group: dist.all_reduce(bucket, group=replicas). Other stages have other parameters."
)
_WAIT_HINT: Final = (
    "An operation with async_op=True returns a handle. Call its wait() before you read the result."
)


def average_gradients(function: Answer, *, seed: int | None = None) -> CheckResult:
    """Checks a function that averages gradients over the replicas of a stage.

    ``function(gradients, replicas)`` gets the gradients of this rank's stage, a list of float32
    tensors, and the process group of the ranks that have the same stage. It writes the mean over
    the group into each tensor, by a single ``all_reduce`` of them all. It is called on pipelines of
    several stages and replicas. The trace must show one such operation, on that group, of as many
    bytes as the gradients have.

    Args:
        function: the answer.
        seed: seed of the numbers; None for a random one.

    Returns:
        The verdict; its trace is that of the last run.

    Example:
        >>> print(average_gradients(lambda gradients, replicas: None, seed=1).reason)
        With 2 stages and 2 replicas the gradients of rank 0 are what they were before.
    """
    return examine("average_gradients", function, _judge, seed)


def _judge(examination: Examination) -> str:
    for stages, replicas in SIZES:
        about = f"With {count(stages, 'stage')} and {count(replicas, 'replica')}"
        trace = examination.run(
            _average_on_rank, stages * replicas, stages, examination.random.randrange(10**9)
        )
        _judge_waits(trace, about)
        _judge_numbers(trace, stages, about)
        _judge_operations(trace, stages, about)
    sizes = ", ".join(f"{stages} x {replicas}" for stages, replicas in SIZES)
    return (
        f"Right for {sizes} stages and replicas, with one all_reduce of {4 * NUMBERS} bytes on "
        "each rank."
    )


def _average_on_rank(
    function: Answer, stages: int, secret: int
) -> tuple[list[float], list[float] | None]:
    """Returns the gradients of this rank before and after; None if they have other shapes then."""
    import torch  # here, so that a process that only starts ranks does not load it

    from ringsim import comm as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(stage, size, stages))) for stage in range(stages)]
    draw = random.Random(f"{secret}/{rank}")
    gradients = [
        torch.tensor([float(draw.randrange(1, 1000)) for _ in range(math.prod(shape))]).view(shape)
        for shape in SHAPES
    ]
    before = torch.cat([gradient.flatten() for gradient in gradients]).tolist()
    function(list(gradients), groups[rank % stages])
    after: list[float] = []
    for gradient, shape in zip(gradients, SHAPES, strict=True):
        found = plain_tensor(gradient)
        if isinstance(found, str) or found[0] != shape:
            return before, None
        after += found[1]
    return before, after


def _judge_waits(trace: Trace, about: str) -> None:
    for event in trace:
        if event.kind == "collective" and event.status != "ok":
            raise Wrong(f"{about} rank {event.rank}'s {event.op} is never waited for.", _WAIT_HINT)


def _judge_numbers(trace: Trace, stages: int, about: str) -> None:
    """The gradients must be the means; of some that are not, it is said what they are."""
    for rank, (_, found) in enumerate(trace.results):
        if found is None:
            reason = f"{about} the gradients of rank {rank} have other shapes than before."
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
            what, hint = "what they were before", _PLACE_HINT
        elif np.allclose(after[rank], total):
            what, hint = "the sum over the replicas, and must be the mean", _MEAN_HINT
        elif np.allclose(after[rank], total / size):
            what = f"divided by the {size} ranks of the world, not by those of the group"
            hint = _MEAN_HINT
        elif any(np.allclose(after[rank], like) for like in mixed):
            what, hint = "mixed with those of other stages", _GROUP_HINT
        else:
            what, hint = "not the mean over its replicas", f"{_BUCKET_HINT} {_MEAN_HINT}"
        raise Wrong(f"{about} the gradients of rank {rank} are {what}.", hint)


def _judge_operations(trace: Trace, stages: int, about: str) -> None:
    """Each rank must have called one all_reduce, on its group, of all gradients at once."""
    events = trace.events
    for rank in range(trace.world_size):
        called = np.flatnonzero(
            (events.rank == rank)
            & np.isin(events.kind, (SEND, RECV, COLLECTIVE))
            & (events.op != OP_CODES["new_group"])
        )
        names = [OP_NAMES[op] for op in events.op[called]]
        who = f"{about} rank {rank}"
        if names != ["all_reduce"]:
            called_ones = ", ".join(dict.fromkeys(names)) or "none"
            raise Wrong(
                f"{who} must call one all_reduce, called {count(len(names), 'operation')} "
                f"({called_ones}).",
                _BUCKET_HINT,
            )
        (index,) = called
        members = tuple(events.tables.groups[events.group[index]].ranks)
        due = tuple(range(rank % stages, trace.world_size, stages))
        if members != due:
            raise Wrong(
                f"{who} must reduce over ranks {due}, and did so over {members}.", _GROUP_HINT
            )
        sent = events.size_bytes[index]
        if sent != 4 * NUMBERS:
            raise Wrong(
                f"{who} must reduce {4 * NUMBERS} bytes, as many as it has gradients, and "
                f"reduced {sent}.",
                _BUCKET_HINT,
            )
